"use strict";
// What both pages of `fipa serve` share: events of the server, parts that it sends, and ages.

const lost = document.getElementById("lost");

// Listen; the browser connects again by itself when the connection is lost.
function listen(query, handlers) {
  const source = new EventSource(`/events?${query}`);
  source.addEventListener("open", () => { lost.hidden = true; });
  source.addEventListener("error", () => { lost.hidden = false; });
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => { handle(JSON.parse(event.data)); ages(); });
  }
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });  // kept by the browser, deaf
}

// An element from a part that the server made, in which names are escaped.
function element(html) {
  const holder = document.createElement("template");
  holder.innerHTML = html.trim();
  return holder.content.firstElementChild;
}

// Put a new part in the place of an old one, without taking the focus from the reader.
function swap(old, next) {
  const focusable = "a, button, input, [tabindex]";
  const place = [...old.querySelectorAll(focusable)].indexOf(document.activeElement);
  old.replaceWith(next);
  if (place >= 0) [...next.querySelectorAll(focusable)][place]?.focus();
}

function ages() {
  for (const time of document.querySelectorAll("time[data-at]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - Number(time.dataset.at)));
    const [size, name] = seconds < 90 ? [1, "s"] : seconds < 5400 ? [60, "min"] : seconds < 172800 ? [3600, "h"] : [86400, "d"];
    time.textContent = `${Math.round(seconds / size)} ${name} ago`;
    time.dateTime = new Date(1000 * Number(time.dataset.at)).toISOString();
  }
}

ages();
setInterval(ages, 1000);
