// Tables that sort, figures as PNG. Without scripts the page shows the same, and CSV is a link.
"use strict";

const UNITS = {kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "\u00b5s": 1e-6, ms: 1e-3};

/** The number with which a cell begins, in its unit; null for a dash. */
function size(cell) {
  const found = cell.textContent.trim().replace("\u2212", "-").match(/^([+-]?[\d.]+(?:e[+-]?\d+)?)\s*(\S*)/);
  return found ? Number(found[1]) * (UNITS[found[2]] || 1) : null;
}

/** Order the rows by one column; a detail stays below its row, and cells without a number come last. */
function sort(table, column, down) {
  const body = table.tBodies[0], groups = [];
  for (const row of body.rows) {
    if (row.classList.contains("detail")) groups.at(-1).push(row);
    else groups.push([row]);
  }
  groups.sort(([one], [other]) => {
    const a = size(one.cells[column]), b = size(other.cells[column]);
    if (a !== null && b !== null) return down ? b - a : a - b;
    if (a !== null || b !== null) return a === null ? 1 : -1;
    const order = one.cells[column].textContent.localeCompare(other.cells[column].textContent);
    return down ? -order : order;
  });
  body.append(...groups.flat());
}

for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.ariaSort === "ascending";
      headings.forEach(other => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort(table, column, down);
    });
  });
}

/** A figure as it is shown, with the legend of its section, as the address of a PNG. */
async function picture(figure) {
  const [svg, html] = ["svg", "body"].map(tag => document.querySelector(tag).namespaceURI);
  const copy = figure.cloneNode(true), legend = figure.closest(".charts")?.querySelector(":scope > .legend");
  copy.querySelector(".take").remove();
  if (legend) copy.append(legend.cloneNode(true));
  copy.style.width = `${figure.clientWidth}px`;
  // Its height is known where it stands as it will be drawn.
  figure.parentNode.append(copy);
  const width = copy.offsetWidth + 32, height = copy.offsetHeight + 24;
  copy.style.margin = "12px 16px";
  const drawing = document.createElementNS(svg, "svg"), frame = document.createElementNS(svg, "foreignObject");
  for (const part of [drawing, frame]) {
    part.setAttribute("width", width);
    part.setAttribute("height", height);
  }
  const body = document.createElementNS(html, "body");
  body.append(document.querySelector("style").cloneNode(true), copy);
  frame.append(body);
  drawing.append(frame);
  const image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(drawing));
  await image.decode();
  const canvas = document.createElement("canvas"), scale = 2;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.scale(scale, scale);
  context.drawImage(image, 0, 0);
  return canvas.toDataURL("image/png");
}

for (const button of document.querySelectorAll("button.png")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const link = document.createElement("a");
    link.download = `${button.dataset.name}.png`;
    link.href = await picture(button.closest("figure"));
    link.click();
  });
}
