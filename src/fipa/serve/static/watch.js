// One run or several: panels, the main figure and the table of arms, as they change.

const page = JSON.parse(document.getElementById("charts").textContent);
const shapes = JSON.stringify(page.sections.map((section) => section.shape));
const figures = page.sections.map((section, k) => wireFigure(document.querySelector(`[data-section="${k}"]`), section.data));

function swapAll(box, parts, key) {
  for (const html of parts) {
    const next = element(html);
    const old = [...box.children].find((part) => part.getAttribute(key) === next.getAttribute(key));
    if (old) swap(old, next);
    else box.append(next);
  }
}

listen(page.query, {
  panels: (parts) => swapAll(document.getElementById("panels"), parts, "data-panel"),
  arms: (parts) => swapAll(document.getElementById("arms"), parts, "data-arms"),
  charts: (sections) => {
    if (JSON.stringify(sections.map((section) => section.shape)) !== shapes) location.reload();
    else sections.forEach((section, k) => figures[k].replace(section.data));
  },
});
