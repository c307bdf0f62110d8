// Wiring: controls change a section's state, and the charts that depend on it are drawn again.

// Plotly would offer to upload the chart to its cloud; nothing leaves this page.
const PRIVATE = { showSendToCloud: false, plotlyServerURL: "" };
const CONFIG = { ...PRIVATE, responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
const report = JSON.parse(document.getElementById("report-data").textContent);
const redraws = [];

function draw(box, chart, config = CONFIG) {
  Plotly.react(box, ...chart, config);
}

function fill(menu, options) {
  menu.replaceChildren(...options.map((text) => new Option(text, text)));
}

// A group of buttons of which one is pressed; calls back with its value.
function wireChoice(root, name, change) {
  const buttons = [...root.querySelectorAll(`[data-${name}]`)];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      change(button.getAttribute(`data-${name}`));
    });
  }
}

function press(root, name, value) {
  for (const button of root.querySelectorAll(`[data-${name}]`)) {
    button.setAttribute("aria-pressed", String(button.getAttribute(`data-${name}`) === value));
  }
}

function legend(root, section, state, change) {
  for (const arm of section.arms) {
    const dash = { solid: "none", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" }[arm.dash];
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.innerHTML = `<svg width="22" height="8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" stroke="${arm.colour}" stroke-width="3" stroke-dasharray="${dash}"/></svg>`;
    button.append(arm.name);
    button.addEventListener("click", () => {
      const shown = state.hidden.delete(arm.name);
      if (!shown) state.hidden.add(arm.name);
      button.setAttribute("aria-pressed", String(shown));
      change();
    });
    root.append(button);
  }
}

// A chart of one arm at a time, chosen from the arms that have the data.
function perArm(root, name, section, chart, options) {
  const block = root.querySelector(`[data-block="${name}"]`);
  if (!block) return;
  const arms = section.arms.filter((arm) => arm[name]);
  const box = block.querySelector(".chart");
  const armMenu = block.querySelector("[data-arm]");
  const extra = block.querySelector("[data-round]");
  fill(armMenu, arms.map((arm) => arm.name));
  const chosen = () => arms[armMenu.selectedIndex];
  const redraw = () => draw(box, chart(chosen(), extra?.value));
  const refill = () => {
    if (extra) fill(extra, options(chosen()));
    redraw();
  };
  armMenu.addEventListener("change", refill);
  extra?.addEventListener("change", redraw);
  redraws.push(redraw);
  refill();
}

function wireSection(root, section) {
  const state = { axis: section.axes[0].key, scale: section.metric.scale, band: true, seeds: false, averaged: true, hidden: new Set(), series: null, seriesScale: "linear" };
  const boxOf = (name) => root.querySelector(`[data-chart="${name}"]`);
  const metric = () => draw(boxOf("metric"), metricChart(section, state));
  const series = () => boxOf("series") && draw(boxOf("series"), seriesChart(section, state));
  const gap = () => boxOf("gap") && draw(boxOf("gap"), gapChart(section, state));
  const fits = () => section.views.forEach((view, k) => view.curves && draw(boxOf(`fit-${k}`), fitChart(view.curves, section, state)));
  const errors = () => section.views.forEach((view, k) => view.curves?.errors && draw(boxOf(`error-${k}`), errorChart(view.curves, section, state)));
  const shared = () => section.views.forEach((view, k) => {
    if (view.warmup) draw(boxOf(`warmup-${k}`), warmupChart(view.warmup, section));
    if (view.shares) draw(boxOf(`shares-${k}`), sharesChart(view.shares));
  });
  const lines = () => [metric, series, gap, fits, errors].forEach((redraw) => redraw());

  legend(root.querySelector(".legend"), section, state, lines);
  wireChoice(root, "axis", (value) => { state.axis = value; metric(); });
  wireChoice(root, "scale", (value) => { state.scale = value; metric(); });
  wireChoice(root, "series-scale", (value) => { state.seriesScale = value; series(); });
  for (const name of ["band", "seeds", "averaged"]) {
    root.querySelector(`input[data-${name}]`)?.addEventListener("change", (event) => { state[name] = event.target.checked; metric(); });
  }
  const menu = root.querySelector("[data-series]");
  const choose = () => {
    state.series = menu.value;
    // Losses and dampings that fall by orders of magnitude are unreadable on a linear axis.
    const values = section.arms.flatMap((arm) => arm.series?.[state.series]?.median ?? []).filter((v) => v !== null);
    state.seriesScale = Math.min(...values) > 0 && Math.max(...values) > 50 * Math.min(...values) ? "log" : "linear";
    press(root, "series-scale", state.seriesScale);
    series();
  };
  menu?.addEventListener("change", choose);
  if (menu) choose();
  section.views.forEach((view, k) => {
    if (view.warmup) boxOf(`warmup-${k}`).classList.add("short");
    if (view.shares) boxOf(`shares-${k}`).classList.add(view.shares.classes.length > 15 ? "huge" : "tall");
  });
  lines();
  shared();
  redraws.push(lines, shared);

  perArm(root, "spectra", section, spectraChart, (arm) => Object.keys(arm.spectra).sort((a, b) => b - a));
  for (const name of ["schedule", "steering"]) boxOf(name)?.classList.add("tall");
  perArm(root, "schedule", section, scheduleChart);
  perArm(root, "steering", section, steeringChart);
  section.views.forEach((view, k) => view.maps && wireMaps(root.querySelector(`[data-block="maps-${k}"]`), view.maps));
}

function wireMaps(block, view) {
  const grid = block.querySelector(".chart");
  const menu = block.querySelector("[data-arm]");
  fill(menu, Object.keys(view.solutions));
  if (view.chosen !== null) menu.value = view.chosen;
  grid.classList.add("maps");
  grid.replaceChildren(...mapCharts(view, menu.value).map(() => document.createElement("div")));
  const redraw = () => mapCharts(view, menu.value).forEach((chart, k) => draw(grid.children[k], chart, { ...CONFIG, displayModeBar: false }));
  menu.addEventListener("change", redraw);
  redraws.push(redraw);
  redraw();
}

// Sort numerically where both values are numbers; "inf" is one, an empty cell goes last either way.
function compare(a, b) {
  const number = (text) => (/^-?inf$/.test(text) ? Infinity * (text[0] === "-" ? -1 : 1) : Number(text));
  const [x, y] = [number(a), number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x === y ? 0 : x - y;
}

function wireTable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const valueOf = (row) => row.children[column].dataset.value;
      const missing = (row) => ["", "nan"].includes(valueOf(row));
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        if (missing(a) || missing(b)) return missing(a) - missing(b);
        return compare(valueOf(a), valueOf(b)) * (direction === "ascending" ? 1 : -1);
      });
      table.tBodies[0].append(...rows);
    });
  });
}

document.querySelectorAll("[data-section]").forEach((root, index) => wireSection(root, report[index]));
document.querySelectorAll("table").forEach(wireTable);

const redrawAll = () => redraws.forEach((redraw) => redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
// Paper is white whatever the screen is.
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redrawAll(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; redrawAll(); });
