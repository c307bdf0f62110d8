"use strict";
// Light and dark for both pages, and the groups of buttons that they are chosen with.

const redraws = []; // what draws its chart again, in other colours

function press(root, name, value) {
  for (const button of root.querySelectorAll(`[data-${name}]`)) {
    button.setAttribute("aria-pressed", String(button.getAttribute(`data-${name}`) === value));
  }
}

// A group of buttons of which one is pressed; calls back with its value.
function wireChoice(root, name, change) {
  root.querySelectorAll(`[data-${name}]`).forEach((button) => button.addEventListener("click", () => {
    const value = button.getAttribute(`data-${name}`);
    press(root, name, value);
    change(value);
  }));
}

const redrawAll = () => redraws.forEach((redraw) => redraw());

// Light, dark, or as the system has it; kept for the next page where the browser allows it.
function wireTheme() {
  const root = document.documentElement;
  const keep = (value) => { try { localStorage.setItem("fipa-theme", value); } catch { /* a page without storage */ } };
  const kept = () => { try { return localStorage.getItem("fipa-theme"); } catch { return null; } };
  const apply = (value) => {
    if (value === "auto") delete root.dataset.theme;
    else root.dataset.theme = value;
    press(document, "theme-choice", value);
  };
  const chosen = () => root.dataset.theme ?? "auto";
  apply(["light", "dark"].includes(kept()) ? kept() : "auto");
  document.querySelector(".themes").hidden = false;
  wireChoice(document, "theme-choice", (value) => { apply(value); keep(value); redrawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  // Paper is white whatever the screen is.
  let before = "auto";
  addEventListener("beforeprint", () => { before = chosen(); apply("light"); redrawAll(); });
  addEventListener("afterprint", () => { apply(before); redrawAll(); });
}

wireTheme();
