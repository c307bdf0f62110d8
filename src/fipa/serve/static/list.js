// The list of runs: rows come and go, and are filtered.

const list = document.getElementById("runs");
const find = document.getElementById("find");
const stateMenu = document.getElementById("state");

// Nothing can be compared before something is chosen.
function choose() {
  document.querySelector("button[type=submit]").disabled = !list.querySelector("input:checked");
}

function filter() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of list.children) {
    const text = row.textContent.toLowerCase();
    const seen = words.every((word) => text.includes(word)) && ["", row.dataset.state].includes(stateMenu.value);
    row.hidden = !seen;
    shown += seen;
  }
  document.getElementById("count").textContent = `${shown} of ${list.children.length} runs`;
  document.getElementById("none").hidden = list.children.length > 0;
  choose();
}

function rowOf(id) {
  return [...list.children].find((row) => row.dataset.run === id);
}

function update({ order, changed }) {
  for (const [id, html] of Object.entries(changed)) {
    const row = element(html);
    const old = rowOf(id);
    if (old) {
      row.querySelector("input").checked = old.querySelector("input").checked;
      swap(old, row);
    } else list.append(row);
  }
  for (const row of [...list.children]) if (!order.includes(row.dataset.run)) row.remove();
  order.forEach((id, place) => {
    const row = rowOf(id);
    if (row && list.children[place] !== row) list.insertBefore(row, list.children[place]);
  });
  filter();
}

find.addEventListener("input", filter);
find.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
list.addEventListener("change", choose);
stateMenu.addEventListener("change", filter);
filter();
listen("", { runs: update });
