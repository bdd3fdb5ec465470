// Tables whose headings sort them, by a click or by Enter: numbers by value, the largest first; words by letters.
// A table of several bodies, each about one thing, has these sorted, by the sums of their numbers.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const number = (cell) => {
    const match = cell ? cell.textContent.trim().replace(/[,\u2009\u202f]/g, "").match(/^[-−]?\d+(\.\d+)?/) : null;
    return match ? Number(match[0].replace("−", "-")) : NaN;
  };
  for (const table of document.querySelectorAll("table")) {
    const head = table.tHead && table.tHead.rows[0];
    const bodies = [...table.tBodies];
    const items = bodies.length > 1 ? bodies : bodies.length ? [...bodies[0].rows] : [];
    if (!head || items.length < 3) continue;
    const cells = (item, column) => [...(item.rows || [item])].map((row) => row.cells[column]).filter(Boolean);
    [...head.cells].forEach((heading, column) => {
      if (!heading.textContent.trim()) return;
      const sort = () => {
        const found = items.map((item) => {
          const numbers = cells(item, column).map(number).filter((value) => !Number.isNaN(value));
          const text = cells(item, bodies.length > 1 ? 0 : column).map((cell) => cell.textContent.trim())[0] || "";
          return { item, text, value: numbers.length ? numbers.reduce((a, b) => a + b) : NaN };
        });
        const numeric = found.some((each) => !Number.isNaN(each.value));
        const before = heading.getAttribute("aria-sort");
        const rising = before ? before === "descending" : !numeric;
        for (const other of head.cells) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const sign = rising ? 1 : -1;
        const missing = (each) => numeric && Number.isNaN(each.value); // last in either order
        found.sort((a, b) => missing(a) - missing(b) || sign * (numeric && !missing(a) ? a.value - b.value
          : a.text.localeCompare(b.text)));
        for (const each of found) each.item.parentNode.appendChild(each.item);
      };
      heading.tabIndex = 0;
      heading.style.cursor = "pointer";
      heading.title = "Sort by this";
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});
