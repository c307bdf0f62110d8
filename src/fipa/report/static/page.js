// The report: folded charts are drawn when they are unfolded, and again when what they depend on changes.

const report = JSON.parse(document.getElementById("report-data").textContent);

// Draw a block's chart while it is unfolded; what comes back draws it again if it has been drawn.
function whenUnfolded(block, redraw) {
  if (!block) return () => {};
  let drawn = false;
  const again = () => { if (block.open) { redraw(); drawn = true; } else drawn = false; };
  block.addEventListener("toggle", () => { if (block.open && !drawn) again(); });
  redraws.push(again);
  return again;
}

// A chart of one arm at a time, chosen from the arms that have the data.
function perArm(root, name, section, chart, options) {
  const block = root.querySelector(`[data-block="${name}"]`);
  if (!block) return;
  const arms = section.arms.filter((arm) => arm[name]);
  const box = block.querySelector(".chart");
  const armMenu = block.querySelector("[data-arm]");
  const extra = block.querySelector("[data-round]");
  const chosen = () => arms[armMenu.selectedIndex];
  const refill = () => { if (extra) fill(extra, options(chosen())); };
  fill(armMenu, arms.map((arm) => arm.name));
  refill();
  const redraw = whenUnfolded(block, () => draw(box, chart(chosen(), extra?.value)));
  armMenu.addEventListener("change", () => { refill(); redraw(); });
  extra?.addEventListener("change", redraw);
}

// The menu of series; returns its state.
function seriesMenu(root, section, change) {
  const menu = root.querySelector("[data-series]");
  const state = { series: null, seriesScale: "linear" };
  const choose = () => {
    state.series = menu.value;
    // Losses and dampings that fall by orders of magnitude are unreadable on a linear axis.
    const values = section.arms.flatMap((arm) => arm.series?.[state.series]?.median ?? []).filter((v) => v !== null);
    state.seriesScale = Math.min(...values) > 0 && Math.max(...values) > 50 * Math.min(...values) ? "log" : "linear";
    press(root, "series-scale", state.seriesScale);
    change();
  };
  menu?.addEventListener("change", choose);
  wireChoice(root, "series-scale", (value) => { state.seriesScale = value; change(); });
  if (menu) choose();
  return state;
}

function wireMaps(block, view) {
  const grid = block.querySelector(".chart");
  const menu = block.querySelector("[data-arm]");
  fill(menu, Object.keys(view.solutions));
  if (view.chosen !== null) menu.value = view.chosen;
  grid.classList.add("maps");
  grid.replaceChildren(...mapCharts(view, menu.value).map(() => document.createElement("div")));
  const config = { ...CONFIG, displayModeBar: false };
  const redraw = whenUnfolded(block, () => mapCharts(view, menu.value).forEach((chart, k) => draw(grid.children[k], chart, config)));
  menu.addEventListener("change", redraw);
}

function wireSection(root, section) {
  const boxOf = (name) => root.querySelector(`[data-chart="${name}"]`);
  const follow = []; // what depends on the arms that are chosen
  const folded = (name, chart) => whenUnfolded(root.querySelector(`[data-block="${name}"]`), () => draw(boxOf(name), chart()));
  const { state } = wireFigure(root, section, () => follow.forEach((redraw) => redraw()));
  let redrawSeries = () => {};
  const series = seriesMenu(root, section, () => redrawSeries());
  redrawSeries = folded("series", () => seriesChart(section, { ...state, ...series }));
  follow.push(redrawSeries, folded("gap", () => gapChart(section, state)));
  section.views.forEach((view, k) => {
    if (view.curves) follow.push(folded(`fit-${k}`, () => fitChart(view.curves, section, state)));
    if (view.curves?.errors) follow.push(folded(`error-${k}`, () => errorChart(view.curves, section, state)));
    if (view.warmup) folded(`warmup-${k}`, () => warmupChart(view.warmup, section));
    if (view.shares) folded(`shares-${k}`, () => sharesChart(view.shares));
    if (view.maps) wireMaps(root.querySelector(`[data-block="maps-${k}"]`), view.maps);
    boxOf(`warmup-${k}`)?.classList.add("short");
    boxOf(`shares-${k}`)?.classList.add(view.shares.classes.length > 15 ? "huge" : "tall");
  });
  for (const name of ["schedule", "steering"]) boxOf(name)?.classList.add("tall");
  perArm(root, "spectra", section, spectraChart, (arm) => Object.keys(arm.spectra).sort((a, b) => b - a));
  perArm(root, "schedule", section, scheduleChart);
  perArm(root, "steering", section, steeringChart);
}

document.querySelectorAll("[data-section]").forEach((root, index) => wireSection(root, report[index]));
document.querySelectorAll("table").forEach(wireTable);
