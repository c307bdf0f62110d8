"""Lanes of tests, groups that share what is expensive, and how many examples hypothesis tries."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from browsing import browser  # noqa: F401
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
SLOW = ("browser", "simulation", "deployment", "convergence", "long")  # what `make test-fast` leaves out
MANY = 100  # tests
WAITING = ("deployment", "simulation")  # what mostly waits for processes of Flower and Ray: one at a time of each
PAGE = "opened"  # fixture: the page that is loaded again after any other one
GROUPED = {"browser": "browser", "site": "browser"}  # fixtures of a session, by the group of all tests that use them

# No deadlines: a busy machine is no bug. `pytest --hypothesis-profile=thorough` is for changes of the mathematics.
_ALWAYS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", max_examples=15, **_ALWAYS)
settings.register_profile("thorough", max_examples=500, **_ALWAYS)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    """Copies of a shared basis go to a folder that ends with the tests, one for each worker."""
    folder = tempfile.TemporaryDirectory(prefix="fipa-tests-")
    os.environ["FIPA_CACHE"] = folder.name
    config.add_cleanup(folder.cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Without looking for garbage among what is imported, which would take more than a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the browser are of its lane; tests of a module or session fixture go to one worker."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        for lane in WAITING:
            if item.get_closest_marker(lane):
                item.add_marker(pytest.mark.xdist_group(lane))
        shared = next((name for name in fixtures if _shared(item, name)), None)
        if shared is not None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(GROUPED.get(shared, item.path.stem)))
    items.sort(key=_rank)


def pytest_collection_finish(session: pytest.Session) -> None:
    """All that is imported stays: every run collects garbage before it measures memory, and need not look at it."""
    if len(session.items) > MANY:
        importlib.import_module("torch._dynamo")  # half of all there is; some test will
    _freeze()
    gc.set_threshold(10_000)  # traces of models are many small objects, few of them garbage


@pytest.fixture(autouse=True)
def _names_as_before() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    registries = importlib.import_module("fipa.problems.files").REGISTRIES
    before = [dict(known) for known in registries]
    yield
    for known, names in zip(registries, before, strict=True):
        known.clear()
        known.update(names)


@pytest.hookimpl(trylast=True)  # when its fixtures are gone
def pytest_runtest_teardown() -> None:
    """So does what a test has imported or cached, if it has looked for garbage: the next one would look at it again.

    Copies of bases and models go: every client looks through all of them for old ones.
    """
    for kind in os.scandir(os.environ["FIPA_CACHE"]):
        shutil.rmtree(kind, ignore_errors=True)
    if _looks() > _seen[0]:
        _freeze()


_seen = [0]


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    _seen[0] = _looks()


def _looks() -> int:
    """How often all there is was looked through for garbage."""
    return int(gc.get_stats()[2]["collections"])


def _rank(item: pytest.Item) -> tuple[bool, ...]:
    """First those that wait, while other workers compute; then the long ones; those that share a page side by side."""
    return not _lane(item, WAITING), not _lane(item, SLOW), PAGE not in getattr(item, "fixturenames", ())


def _lane(item: pytest.Item, lanes: Sequence[str]) -> bool:
    """Whether a test is of one of these lanes."""
    return any(item.get_closest_marker(lane) for lane in lanes)


def _shared(item: pytest.Item, fixture: str) -> bool:
    """Made once for several tests, by one of our own fixtures."""
    found = item.session._fixturemanager.getfixturedefs(fixture, item) or ()
    return any(one.scope != "function" and HERE in Path(one.func.__code__.co_filename).parents for one in found)
