// What report.html and the page of `fipa serve` share: the main figure with its legend, and tables that sort.

// Plotly would offer to upload the chart to its cloud; nothing leaves this page.
const PRIVATE = { showSendToCloud: false, plotlyServerURL: "" };
const CONFIG = { ...PRIVATE, responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
const DASH_ARRAYS = { solid: "none", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" };

function draw(box, chart, config = CONFIG) {
  Plotly.react(box, ...chart, config);
}

function fill(menu, options) {
  menu.replaceChildren(...options.map((text) => new Option(text, text)));
}

// A button for every arm: in colour while it is pressed, else grey. The buttons stay while a run goes on.
function fillLegend(box, section, state, change) {
  const known = new Map([...box.children].map((button) => [button.dataset.name, button]));
  const first = (arm) => Number(!section.chosen.includes(arm.name));
  box.replaceChildren(...[...section.arms].sort((a, b) => first(a) - first(b)).map((arm) => {
    const button = known.get(arm.name) ?? document.createElement("button");
    if (!known.has(arm.name)) {
      button.type = "button";
      button.dataset.name = arm.name;
      button.addEventListener("click", () => {
        if (!state.muted.delete(arm.name)) state.muted.add(arm.name);
        change();
      });
    }
    button.setAttribute("aria-pressed", String(!state.muted.has(arm.name)));
    button.innerHTML = `<svg width="26" height="10" aria-hidden="true"><line x1="0" x2="26" y1="5" y2="5" stroke="${arm.colour}" stroke-width="3" stroke-dasharray="${DASH_ARRAYS[arm.dash]}"/></svg>`;
    button.append(arm.name);
    return button;
  }));
}

// The main figure. `follow` is called where other charts depend on which arms are chosen.
function wireFigure(root, first, follow = () => {}) {
  let section = first;
  const unchosen = () => section.arms.map((arm) => arm.name).filter((name) => !section.chosen.includes(name));
  const state = { axis: section.axes[0].key, scale: section.metric.scale, band: true, seeds: false, averaged: true, others: true, muted: new Set(unchosen()) };
  const seen = new Set(section.arms.map((arm) => arm.name));
  const box = root.querySelector("[data-chart=metric]");
  const legend = root.querySelector(".legend");
  const redraw = () => {
    const focused = document.activeElement?.dataset?.name;
    fillLegend(legend, section, state, change);
    if (focused !== undefined) [...legend.children].find((button) => button.dataset.name === focused)?.focus();
    draw(box, metricChart(section, state));
  };
  const change = () => { redraw(); follow(); };
  wireChoice(root, "axis", (value) => { state.axis = value; redraw(); });
  wireChoice(root, "scale", (value) => { state.scale = value; redraw(); });
  for (const name of ["band", "seeds", "averaged", "others"]) {
    root.querySelector(`input[data-${name}]`)?.addEventListener("change", (event) => { state[name] = event.target.checked; redraw(); });
  }
  root.querySelectorAll("[data-colour]").forEach((button) => button.addEventListener("click", () => {
    const names = { best: unchosen(), all: [], none: section.arms.map((arm) => arm.name) }[button.dataset.colour];
    state.muted.clear();
    names.forEach((name) => state.muted.add(name));
    change();
  }));
  // New numbers of the same runs: what the reader has chosen stays, and an arm that has begun is shown.
  const replace = (next) => {
    section = next;
    for (const arm of section.arms.filter((a) => !seen.has(a.name))) {
      seen.add(arm.name);
      if (!section.chosen.includes(arm.name)) state.muted.add(arm.name);
    }
    if (!section.axes.some((a) => a.key === state.axis)) state.axis = section.axes[0].key;
    redraw();
  };
  redraws.push(redraw);
  redraw();
  return { state, replace };
}

// Sort numerically where both values are numbers; "inf" is one, an empty cell goes last either way.
function compare(a, b) {
  const number = (text) => (/^-?inf$/.test(text) ? Infinity * (text[0] === "-" ? -1 : 1) : Number(text));
  const [x, y] = [number(a), number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x === y ? 0 : x - y;
}

function sortRows(table) {
  const heads = [...table.querySelectorAll("thead th")];
  const column = heads.findIndex((head) => head.hasAttribute("aria-sort"));
  if (column < 0) return;
  const direction = heads[column].getAttribute("aria-sort") === "ascending" ? 1 : -1;
  const valueOf = (row) => row.children[column].dataset.value;
  const missing = (row) => ["", "nan"].includes(valueOf(row));
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return compare(valueOf(a), valueOf(b)) * direction;
  });
  table.tBodies[0].append(...rows);
}

function wireTable(table) {
  const heads = [...table.querySelectorAll("thead th")];
  for (const head of heads) {
    head.querySelector("button")?.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      sortRows(table);
    });
  }
}
