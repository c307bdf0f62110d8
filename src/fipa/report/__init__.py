"""From a run directory to tables, figures and a page that opens in any browser.

`data` needs numpy alone; `figures` needs matplotlib, `page` plotly and jinja2 (all in `fipa[cli]`), so they are
imported by name: `from fipa.report.page import write_page`.
"""

from fipa.report.data import ArmSummary, load_results, load_views, summary

__all__ = ["ArmSummary", "load_results", "load_views", "summary"]
