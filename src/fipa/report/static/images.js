// Charts of runs on images: the shared warm-up, and how many examples of each class each client holds.

// One thin line per seed and their mean; dotted where arms start before the last round.
function warmupChart(warmup, section) {
  const { ink, soft } = theme();
  const x = warmup.rounds;
  const thin = { mode: "lines", line: { color: soft, width: 0.8 }, meta: "seed", connectgaps: true };
  const traces = Object.entries(warmup.seeds).map(([seed, y]) =>
    ({ x, y, ...thin, name: `seed ${plain(seed)}`, hovertemplate: `seed ${plain(seed)}<br>%{x}: %{y:.4g}<extra></extra>` }));
  const name = traces.length ? "mean" : "warm-up";
  const mode = x.length < 40 ? "lines+markers" : "lines";
  const look = { mode, line: { color: ink, width: 2.2 }, marker: { size: 4, color: ink }, hovertemplate: `${name}<br>%{x}: %{y:.4g}<extra></extra>` };
  traces.push({ x, y: warmup.mean, ...look, name, meta: "mean" });
  const shapes = warmup.starts.filter((start) => start < x[x.length - 1]).map((start) => ({
    type: "line", xref: "x", yref: "paper", x0: start, x1: start, y0: 0, y1: 1, line: { color: soft, width: 1, dash: "dot" },
  }));
  const log = section.metric.scale === "log";
  return [traces, layout(axis(ROUND, false), axis(plain(section.metric.name), log), { shapes })];
}

// Light for few and dark for many on white paper, the other way round on black; an empty cell is paper.
function shareColours() {
  const dark = parseInt(theme().paper.slice(1, 3), 16) < 128;
  const colours = ["#dbe8f4", "#5b9bd0", "#0b3c7d"];
  return (dark ? colours.reverse() : colours).map((colour, k) => [k / 2, colour]);
}

// Classes by clients, below the clients' totals. The colours follow the root, so that small counts are seen.
function sharesChart(shares) {
  const { ink, soft } = theme();
  const x = shares.totals.map((_, client) => client);
  const y = shares.classes.map((_, k) => k);
  const root = (count) => (count ? Math.sqrt(count) : null);
  const highest = Math.max(1, ...shares.counts.map((row) => Math.max(...row)));
  const ticks = [0, 0.04, 0.16, 0.36, 0.64, 1].map((part) => Math.round(part * highest));
  const bar = { thickness: 12, outlinewidth: 0, tickfont: { color: ink }, tickvals: ticks.map(Math.sqrt), ticktext: ticks.map(String), len: 0.78, y: 0, yanchor: "bottom" };
  const cells = {
    type: "heatmap", x, y, z: shares.counts.map((row) => row.map(root)), zmin: 0, zmax: Math.sqrt(highest),
    text: shares.counts.map((row) => row.map((count) => (count ? String(count) : ""))), customdata: shares.classes.map((name) => x.map(() => plain(name))),
    ...(shares.numbered ? { texttemplate: "%{text}", textfont: { size: 10 } } : {}),
    colorscale: shareColours(), colorbar: bar, hoverongaps: false, xgap: x.length > 40 ? 0 : 1, ygap: y.length > 40 ? 0 : 1,
    hovertemplate: "client %{x}, %{customdata}: %{text}<extra></extra>", meta: "shares",
  };
  const hovertemplate = "client %{x}: %{y} examples<extra></extra>";
  const totals = { type: "bar", x, y: shares.totals, yaxis: "y2", marker: { color: soft }, hovertemplate, meta: "totals" };
  const names = shares.named ? { tickvals: y, ticktext: shares.classes.map(plain) } : whole(y);
  const clients = axis("client", false, { ...(x.length <= 20 ? { dtick: 1 } : {}), range: [-0.5, x.length - 0.5], showgrid: false });
  const classes = axis(shares.named ? "" : "class", false, { ...names, domain: [0, 0.78], range: [y.length - 0.5, -0.5], showgrid: false });
  return [[cells, totals], layout(clients, classes, { yaxis2: axis("examples", false, { domain: [0.83, 1], nticks: 4 }) })];
}
