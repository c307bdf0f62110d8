"use strict";
// What to draw: each function returns [traces, layout] for Plotly.react.

const ROUND = "communication round";
const CLIENT_COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#808080"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

// Plotly reads a little HTML in its labels; names from the data are text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), soft: of("--soft"), rule: of("--rule"), paper: of("--paper"), mute: of("--mute") };
}

function axis(title, log, extra = {}) {
  const { rule, soft } = theme();
  const lines = { gridcolor: rule, linecolor: soft, zeroline: false, automargin: true, ticks: "outside", tickcolor: soft };
  const type = log ? { type: "log", exponentformat: "power", minor: { ticks: "outside", dtick: "D1" } } : { type: "linear" };
  return { title: { text: title, standoff: 8 }, ...lines, ...type, ...extra };
}

// Rounds and counts are whole numbers: no ticks between them.
const whole = (values) => (Math.max(...values) - Math.min(...values) < 8 ? { dtick: 1 } : {});

// Between the powers of ten of a log axis that spans few of them, there are numbers too.
function decades(values) {
  const positive = values.filter((v) => v > 0);
  const few = positive.length && Math.max(...positive) < 1000 * Math.min(...positive);
  return few ? { dtick: "D2" } : {};
}

function layout(xaxis, yaxis, extra = {}) {
  const { ink, paper } = theme();
  return {
    xaxis,
    yaxis,
    font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 13 },
    paper_bgcolor: paper,
    plot_bgcolor: paper,
    margin: { l: innerWidth < 640 ? 44 : 60, r: 12, t: 16, b: 48 },
    showlegend: false,
    hovermode: "closest",
    ...extra,
  };
}

const LEGEND_BELOW = { showlegend: true, legend: { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" } };

function fade(colour, opacity) {
  const channels = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  return `rgba(${channels.join(",")},${opacity})`;
}

// Closed outlines around the runs of rounds in which both ends of the band can be drawn. Rounds without any value,
// in which nothing was measured, do not count.
function bandTrace(arm, x, band, log) {
  const outline = { x: [], y: [] };
  const seen = x.map((_, k) => k).filter((k) => [band.low, band.median, band.high].some((line) => line[k] !== null));
  x = seen.map((k) => x[k]);
  band = { low: seen.map((k) => band.low[k]), high: seen.map((k) => band.high[k]) };
  let start = null;
  for (let i = 0; i <= x.length; i += 1) {
    const drawn = i < x.length && band.low[i] !== null && band.high[i] !== null && x[i] !== null && !(log && band.low[i] <= 0);
    if (drawn && start === null) start = i;
    if (drawn || start === null) continue;
    const places = Array.from({ length: i - start }, (_, k) => start + k);
    const back = [...places].reverse();
    outline.x.push(...places.map((k) => x[k]), ...back.map((k) => x[k]), null);
    outline.y.push(...places.map((k) => band.low[k]), ...back.map((k) => band.high[k]), null);
    start = null;
  }
  const look = { fill: "toself", fillcolor: fade(arm.colour, 0.18), line: { width: 0 }, hoverinfo: "skip" };
  return { ...outline, ...look, mode: "lines", name: plain(arm.name), meta: "band", type: "scatter" };
}

function line(arm, x, y, extra = {}) {
  const look = { color: arm.colour, dash: arm.dash, width: 2.2 };
  const marker = { size: 6, color: arm.colour, symbol: arm.mark ?? "circle", maxdisplayed: 16 }; // for those who see no colours
  const hover = `${plain(arm.name)}<br>%{x:.4g}: %{y:.4g}<extra></extra>`;
  return { x, y, mode: "lines+markers", line: look, marker, name: plain(arm.name), hovertemplate: hover, connectgaps: true, ...extra };
}

function metricChart(section, state) {
  const log = state.scale === "log";
  const against = section.axes.find((a) => a.key === state.axis);
  const traces = [];
  const drawn = section.arms.filter((arm) => arm[state.axis]);
  const behind = drawn.filter((arm) => state.muted.has(arm.name) && state.others);
  for (const arm of [...behind, ...drawn.filter((a) => !state.muted.has(a.name))]) {
    // The start, before the first byte, has no place on a log axis, and what comes before the first value needs none.
    const first = arm.metric.median.findIndex((v, k) => v !== null && arm[state.axis][k] > 0);
    const places = arm[state.axis].map((_, k) => k).filter((k) => !against.log || (arm[state.axis][k] > 0 && k >= first));
    const pick = (values) => places.map((k) => values[k]);
    const x = pick(arm[state.axis]);
    const { median, low, high } = arm.metric;
    if (state.muted.has(arm.name)) {
      traces.push(line(arm, x, pick(median), { mode: "lines", line: { color: theme().mute, width: 1.2 }, meta: "muted" }));
      continue;
    }
    if (state.band && low) traces.push(bandTrace(arm, x, { median: pick(median), low: pick(low), high: pick(high) }, log));
    if (state.seeds) {
      for (const [seed, y] of Object.entries(arm.seeds ?? {})) {
        const look = { color: arm.colour, width: 0.8, dash: arm.dash };
        const hovertemplate = `${plain(arm.name)}, seed ${plain(seed)}: %{y:.4g}<extra></extra>`;
        traces.push(line(arm, x, pick(y), { mode: "lines", line: look, meta: "seed", hovertemplate }));
      }
    }
    traces.push(line(arm, x, pick(median), { meta: "median" }));
    if (state.averaged && arm.averaged) {
      const look = { color: arm.colour, width: 1.1, dash: "5px,3px" };
      const hovertemplate = `${plain(arm.name)}, mean of the last models<br>%{x:.4g}: %{y:.4g}<extra></extra>`;
      traces.push(line(arm, x, pick(arm.averaged), { mode: "lines", line: look, meta: "averaged", hovertemplate }));
    }
  }
  const values = section.arms.flatMap((arm) => arm[state.axis] ?? []);
  const ticks = against.log ? { exponentformat: "none", ...decades(values) } : state.axis === "rounds" ? whole(values) : {};
  return [traces, layout(axis(against.title, against.log, ticks), axis(plain(section.metric.name), log))];
}

function seriesChart(section, state) {
  const log = state.seriesScale === "log";
  const traces = [];
  for (const arm of section.arms.filter((a) => !state.muted.has(a.name) && a.series?.[state.series])) {
    const values = arm.series[state.series];
    const x = arm.rounds.slice(1);
    if (values.low) traces.push(bandTrace(arm, x, values, log));
    traces.push(line(arm, x, values.median, { meta: "median" }));
  }
  const ticks = whole(section.arms.flatMap((arm) => arm.rounds));
  return [traces, layout(axis(ROUND, false, ticks), axis(section.names[state.series], log))];
}

function gapChart(section, state) {
  const traces = [];
  for (const arm of section.arms.filter((a) => !state.muted.has(a.name) && a.gap)) {
    const x = arm.rounds.slice(1).map((round) => round - (arm.after ?? 0));
    if (arm.gap.low) traces.push(bandTrace(arm, x, arm.gap, true));
    const slope = arm.gap.exponent === null ? "" : `, measured K^${arm.gap.exponent.toFixed(2)}`;
    traces.push(line(arm, x, arm.gap.median, { meta: "median", name: plain(arm.name) + slope, showlegend: true }));
    if (arm.gap.guide === null) continue;
    const look = { color: arm.colour, width: 1.5, dash: "dot" };
    const guide = { mode: "lines", line: look, meta: "guide", name: `${arm.gap.guide.toPrecision(2)} / K`, hoverinfo: "skip" };
    traces.push({ x, y: x.map((k) => arm.gap.guide / k), ...guide });
  }
  for (const trace of traces.filter((t) => t.meta === "band")) trace.showlegend = false;
  const ticks = (key) => decades(traces.flatMap((t) => t[key]));
  const x = axis("communication round K", true, { exponentformat: "none", ...ticks("x") });
  return [traces, layout(x, axis("gap of the parameters", true, ticks("y")), LEGEND_BELOW)];
}

function clientLine(client, index, x, y, extra = {}) {
  const colour = CLIENT_COLOURS[index % CLIENT_COLOURS.length];
  const dash = DASHES[Math.floor(index / CLIENT_COLOURS.length) % DASHES.length];
  const mode = y.length < 60 ? "lines+markers" : "lines";
  const hovertemplate = `client ${plain(client)}<br>%{x}: %{y:.4g}<extra></extra>`;
  const look = { mode, line: { color: colour, dash, width: 1.8 }, marker: { size: 5, color: colour }, hovertemplate };
  return { x, y, name: `client ${plain(client)}`, legendgroup: client, ...look, ...extra };
}

function spectraChart(arm, round) {
  const traces = Object.entries(arm.spectra[round] ?? {}).map(([client, values], index) => {
    const positive = values.map((v) => (v > 0 ? v : null));
    return clientLine(client, index, values.map((_, k) => k + 1), positive);
  });
  return [traces, layout(axis("index", false), axis("eigenvalue", true), LEGEND_BELOW)];
}

// Panels above each other on one round axis: [{ title, log, traces }].
function stacked(panels, rounds) {
  const height = 1 / panels.length;
  const result = layout(axis(ROUND, false, { anchor: `y${panels.length}`, ...whole(rounds) }), {}, LEGEND_BELOW);
  panels.forEach((panel, index) => {
    const top = 1 - index * height;
    const domain = [Math.max(0, top - height * 0.88), top];
    result[`yaxis${index ? index + 1 : ""}`] = axis(panel.title, panel.log, { domain });
  });
  const traces = panels.flatMap((panel, index) => panel.traces.map((t) => ({ ...t, yaxis: `y${index ? index + 1 : ""}` })));
  return [traces, result];
}

function scheduleChart(arm) {
  const titles = { ranks: "rank", local_steps: "local steps" };
  const panels = Object.entries(arm.schedule.lines).map(([key, clients], panel) => {
    const traces = Object.entries(clients).map(([client, values], index) =>
      clientLine(client, index, arm.schedule.rounds, values, { showlegend: panel === 0, connectgaps: true }));
    return { title: titles[key], log: false, traces };
  });
  return stacked(panels, arm.schedule.rounds);
}

function steeringChart(arm) {
  const { rounds, lines, accepted } = arm.steering;
  const refused = rounds.filter((_, k) => accepted[k] === false);
  const entries = Object.entries(lines).length ? Object.entries(lines) : [["accepted", accepted.map(Number)]];
  const panels = entries.map(([key, values], index) => {
    const positive = values.every((v) => v === null || v > 0);
    const at = refused.map((round) => values[rounds.indexOf(round)]);
    const cross = { mode: "markers", marker: { symbol: "x", size: 9, color: theme().ink }, name: "rejected", showlegend: index === 0 };
    const shown = key === "trials" ? { type: "bar", marker: { color: arm.colour } } : {};
    const traces = [line(arm, rounds, values, { name: key, showlegend: false, ...shown })];
    if (refused.length) traces.push({ x: refused, y: at, ...cross });
    return { title: key, log: positive && (key === "damping" || key === "step"), traces };
  });
  return stacked(panels, rounds);
}

// Lines of the arms over the clients' regions.
function overRegions(view, arms, section, state, yaxis) {
  const { rule } = theme();
  const styles = Object.fromEntries(section.arms.map((arm) => [arm.name, arm]));
  const traces = [];
  for (const [name, y] of Object.entries(arms).filter(([n]) => !state.muted.has(n))) {
    traces.push(line(styles[name] ?? { name, colour: CLIENT_COLOURS[6], dash: "solid" }, view.x, y, { mode: "lines" }));
  }
  const shapes = view.regions.map(([low, high], k) => ({
    type: "rect", xref: "x", yref: "paper", x0: low, x1: high, y0: 0, y1: 1, layer: "below",
    line: { width: 0 }, fillcolor: rule, opacity: k % 2 ? 0.15 : 0.5,
  }));
  const annotations = view.names.map((text, k) => ({
    text, x: (view.regions[k][0] + view.regions[k][1]) / 2, y: 1, yref: "paper", yanchor: "top", yshift: -14 * view.rows[k],
    showarrow: false, font: { size: 11 },
  }));
  return [traces, layout(axis(plain(view.x_label), false), yaxis, { shapes, annotations, ...LEGEND_BELOW })];
}

function fitChart(view, section, state) {
  const [traces, frame] = overRegions(view, view.arms, section, state, axis(plain(view.y_label), false));
  if (view.target === null) return [traces, frame];
  const look = { mode: "lines", line: { color: theme().ink, width: 1.8, dash: "dot" } };
  return [[...traces, { x: view.x, y: view.target, ...look, name: plain(view.target_label) }], frame];
}

function errorChart(view, section, state) {
  const [low, high] = view.range;
  const room = 0.12 * (1 + Math.max(0, ...view.rows)) * (high - low); // for the names of the clients
  return overRegions(view, view.errors, section, state, axis("pointwise error", true, { range: [low, high + room] }));
}

// The target, and the solution and the error of one arm; without a target, its solution alone.
function mapCharts(view, arm) {
  const [x0, x1, y0, y1] = view.extent;
  const { ink } = theme();
  const some = view.target ?? Object.values(view.solutions)[0];
  const [rows, columns] = [some.length, some[0].length];
  const place = { x0, dx: (x1 - x0) / Math.max(1, columns - 1), y0, dy: (y1 - y0) / Math.max(1, rows - 1) };
  const shapes = view.boxes.map(([a, b, c, d]) => ({ type: "rect", x0: a, x1: b, y0: c, y1: d, line: { color: "white", width: 1.2 } }));
  const [low, high] = view.range ?? [0, 1];
  const ticks = Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, k) => Math.ceil(low) + k);
  const bar = { thickness: 12, outlinewidth: 0, tickfont: { color: ink } };
  const logBar = ticks.length > 1 ? { ...bar, tickvals: ticks, ticktext: ticks.map((t) => `10<sup>${t}</sup>`) } : { ...bar, tickprefix: "10^" };
  const limits = { constrain: "domain", range: [x0, x1] };
  const equal = { constrain: "domain", range: [y0, y1], ...(view.square ? { scaleanchor: "x" } : {}) };
  const frame = (name, annotations = []) => layout(axis(plain(view.x_label), false, limits), axis(plain(view.y_label), false, equal), {
    shapes, annotations, title: { text: name, font: { size: 13 } }, margin: { l: 36, r: 8, t: 36, b: 30 },
  });
  const numbers = view.names.map((text, k) => {
    const [left, right, , top] = view.boxes[k];
    const above = view.boxes.slice(0, k).filter((box) => box[0] === left && box[3] === top).length;
    return {
      text, x: left, y: top, xanchor: "left", yanchor: "top", xshift: 2, yshift: -2 - 16 * above, showarrow: false,
      textangle: right - left < 0.2 * (x1 - x0) ? -90 : 0, // across, it would run into the next box
      font: { size: 10, color: "white" }, bgcolor: "rgba(0,0,0,0.45)", borderpad: 1,
    };
  });
  const [least, most] = view.values;
  const values = { type: "heatmap", ...place, colorscale: "Viridis", zmin: least, zmax: most, colorbar: bar, hovertemplate: "%{z:.4g}<extra></extra>" };
  const errors = { type: "heatmap", ...place, colorscale: "Cividis", zmin: low, zmax: high, colorbar: logBar, hovertemplate: "10^%{z:.2f}<extra></extra>" };
  if (view.target === null) return [[[{ ...values, z: view.solutions[arm] }], frame(plain(arm), numbers)]];
  const target = [[{ ...values, z: view.target }], frame(plain(view.target_label), numbers)];
  if (!(arm in view.solutions)) return [target];
  return [
    target,
    [[{ ...values, z: view.solutions[arm] }], frame(plain(arm))],
    [[{ ...errors, z: view.errors[arm] }], frame(`error of ${plain(arm)}`)],
  ];
}
