"use strict";
// The map of the speed-up over depth L and width w: a grid of buttons, a line where the speed-up is 1, and a readout.
(() => {
  const maps = JSON.parse(document.getElementById("map-data").textContent);
  const root = document.getElementById("map");
  const grid = root.querySelector(".map-grid");
  const readout = document.getElementById("map-readout");
  const chosen = { map: 0, cell: null };
  const NAMES = { relu: "ReLU", tanh: "tanh", sigmoid: "sigmoid" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 700px)");
  const print = matchMedia("print");

  const here = () => maps[chosen.map];
  const thousands = (n) => n.toString().replace(/\B(?=(\d{3})+$)/g, ",");
  const significant = (x, digits) => String(Number(x.toPrecision(digits)));

  function times(ratio) {
    return (ratio >= 10 ? thousands(Math.round(ratio)) : significant(ratio, 2)) + "×";
  }

  function inCell(ratio) {
    if (ratio >= 1000) return significant(ratio / 1000, 2) + "k";
    if (ratio >= 10) return String(Math.round(ratio));
    const text = ratio < 0.01 ? "<.01" : significant(ratio, ratio < 0.1 ? 1 : 2);
    return narrow.matches ? text.replace(/^0\./, ".") : text;
  }

  function duration(seconds) {
    const [value, unit] = seconds >= 1 ? [seconds, "s"] : seconds >= 1e-3 ? [seconds * 1e3, "ms"] : [seconds * 1e6, "µs"];
    return `${value >= 100 ? thousands(Math.round(value)) : significant(value, 3)} ${unit}`;
  }

  function entries(depth, width) {
    return here().cells[`${chosen.activation} ${chosen.direction} ${depth} ${width}`] || {};
  }

  function speedup(depth, width) {
    const found = entries(depth, width);
    const mine = (found[chosen.method] || {}).seconds;
    const other = (found[chosen.baseline] || {}).seconds;
    return mine && other ? other / mine : null;
  }

  // Colours: on a logarithmic scale, as far up as down, so that equal factors look equal.

  const EXTENTS = [4, 30, 200]; // beyond the last the colour stays the same

  function extent(map) {
    let most = 1;
    for (const found of Object.values(map.cells)) {
      for (const method of Object.keys(map.methods)) {
        for (const baseline of Object.keys(map.baselines)) {
          const mine = (found[method] || {}).seconds, other = (found[baseline] || {}).seconds;
          if (mine && other) most = Math.max(most, other / mine, mine / other);
        }
      }
    }
    return EXTENTS.find((each) => each >= most) || EXTENTS.at(-1);
  }

  function palette() {
    return dark.matches && !print.matches
      ? { one: [44, 48, 56], fast: [110, 190, 255], slow: [255, 160, 85] }
      : { one: [246, 244, 240], fast: [9, 74, 138], slow: [160, 66, 6] };
  }

  function colour(ratio) {
    const { one, fast, slow } = palette();
    const share = Math.min(1, Math.abs(Math.log(ratio)) / Math.log(chosen.extent));
    return one.map((value, i) => Math.round(value + share * ((ratio > 1 ? fast : slow)[i] - value)));
  }

  function ink(rgb) {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  }

  // The grid: L to the right and w upwards; on a narrow screen L downwards and w to the right.

  // Not every activation was measured at every size: rows in which there is nothing at all are left out.
  function measured(name) {
    const part = { depths: 2, widths: 3 }[name], start = `${chosen.activation} ${chosen.direction} `;
    const there = new Set(Object.keys(here().cells).filter((key) => key.startsWith(start)).map((key) => Number(key.split(" ")[part])));
    return here()[name].filter((size) => there.has(size));
  }

  function axes() {
    const depths = measured("depths"), widths = measured("widths");
    return narrow.matches
      ? { across: widths, down: depths, cell: (i, j) => [depths[i], widths[j]], right: "w", below: "L" }
      : {
          across: depths,
          down: [...widths].reverse(),
          cell: (i, j) => [depths[j], widths[widths.length - 1 - i]],
          right: "depth L",
          below: "width w",
        };
  }

  function make(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in made) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  function draw() {
    const { across, down, cell, right, below } = axes();
    chosen.extent = extent(here());
    grid.replaceChildren();
    grid.style.setProperty("--across", across.length);
    grid.style.setProperty("--down", down.length);
    grid.setAttribute("aria-rowcount", down.length + 1);
    const values = down.map((_, i) => across.map((_, j) => speedup(...cell(i, j))));
    if (!chosen.cell || !measured("depths").includes(chosen.cell[0]) || !measured("widths").includes(chosen.cell[1])) {
      chosen.cell = best(values, cell);
    }
    const head = make("div", { role: "row", className: "map-row" });
    head.append(make("span", { className: "map-corner", role: "columnheader" }, make("span", {}, `${right} →`), make("span", {}, `${below} ${narrow.matches ? "↓" : "↑"}`)));
    for (const value of across) {
      const text = narrow.matches ? String(value) : thousands(value);
      head.append(make("span", { className: "map-head", role: "columnheader" }, text));
    }
    grid.append(head);
    down.forEach((value, i) => {
      const row = make("div", { role: "row", className: "map-row" });
      row.append(make("span", { className: "map-side", role: "rowheader" }, thousands(value)));
      across.forEach((_, j) => row.append(button(values[i][j], ...cell(i, j))));
      grid.append(row);
    });
    const line = breakEven(values);
    grid.append(line);
    const known = values.flat().filter((value) => value !== null);
    let even = "break-even: speed-up 1, read off between cells";
    if (!known.length) even = "no break-even: nothing was timed here";
    else if (known.every((value) => value < 1)) even = "no break-even: the loop is faster everywhere here";
    else if (known.every((value) => value >= 1)) even = "no break-even: parallel is faster everywhere here";
    document.getElementById("map-even").textContent = even;
    legend();
    show();
  }

  function best(values, cell) {
    let found = cell(0, 0), most = -Infinity;
    values.forEach((row, i) => row.forEach((value, j) => {
      if (value !== null && value > most) [most, found] = [value, cell(i, j)];
    }));
    return found;
  }

  function button(ratio, depth, width) {
    const status = ratio === null ? reason(depth, width) : `${times(ratio)}`;
    const made = make("button", {
      type: "button",
      className: ratio === null ? "map-cell untimed" : "map-cell",
      "aria-label": `L ${depth}, w ${width}: ${status}`,
      "data-depth": depth,
      "data-width": width,
    }, make("span", {}, ratio === null ? "–" : inCell(ratio)));
    made.setAttribute("role", "gridcell");
    if (ratio !== null) {
      const rgb = colour(ratio);
      made.style.backgroundColor = `rgb(${rgb.join(",")})`;
      made.style.color = ink(rgb);
    }
    return made;
  }

  function reason(depth, width) {
    const found = entries(depth, width);
    for (const name of [chosen.method, chosen.baseline]) {
      if (!found[name]) return "not measured";
      if (!found[name].seconds) return found[name].status;
    }
    return "not measured";
  }

  // The line of speed-up 1, by marching squares on the logarithm. Outermost values are carried on to the map's edge.

  function breakEven(values) {
    const rows = values.length, columns = values[0].length;
    const field = (i, j) => {
      const value = values[Math.min(rows - 1, Math.max(0, i))][Math.min(columns - 1, Math.max(0, j))];
      return value === null ? null : Math.log(value);
    };
    const place = (k, count) => Math.min(count, Math.max(0, k + 0.5));
    const lines = [];
    for (let i = -1; i < rows; i++) {
      for (let j = -1; j < columns; j++) {
        const corners = [[i, j], [i, j + 1], [i + 1, j + 1], [i + 1, j]];
        const heights = corners.map(([a, b]) => field(a, b));
        if (heights.includes(null)) continue;
        const crossings = [];
        corners.forEach(([a, b], k) => {
          const next = (k + 1) % 4;
          if (heights[k] >= 0 === heights[next] >= 0) return;
          const share = heights[k] / (heights[k] - heights[next]);
          const from = [place(b, columns), place(a, rows)], to = [place(corners[next][1], columns), place(corners[next][0], rows)];
          crossings.push(from.map((value, axis) => (value + share * (to[axis] - value)).toFixed(3)));
        });
        for (let k = 0; k + 1 < crossings.length; k += 2) lines.push(`M${crossings[k]}L${crossings[k + 1]}`);
      }
    }
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", `0 0 ${columns} ${rows}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("class", "map-line");
    svg.setAttribute("aria-hidden", "true");
    for (const name of ["halo", "core"]) {
      const path = document.createElementNS(space, "path");
      path.setAttribute("d", lines.join(""));
      path.setAttribute("class", name);
      svg.append(path);
    }
    return svg;
  }

  function legend() {
    const stops = chosen.extent > 4 ? [-2, -1, 0, 1, 2].map((k) => 10 ** k) : [1 / 3, 1, 3];
    const at = [...Array(21).keys()].map((k) => chosen.extent ** (k / 10 - 1));
    root.querySelector(".map-scale").style.background = `linear-gradient(to right, ${at.map((r) => `rgb(${colour(r).join(",")})`).join(",")})`;
    root.querySelector(".map-ticks").replaceChildren(
      ...stops.filter((r) => Math.abs(Math.log(r)) < Math.log(chosen.extent)).map((r) => {
        const tick = make("span", {}, times(r));
        tick.style.left = `${50 + (50 * Math.log(r)) / Math.log(chosen.extent)}%`;
        return tick;
      }),
    );
  }

  function show() {
    const [depth, width] = chosen.cell, found = entries(depth, width), ratio = speedup(depth, width);
    for (const cell of grid.querySelectorAll(".map-cell")) {
      const mine = Number(cell.dataset.depth) === depth && Number(cell.dataset.width) === width;
      cell.tabIndex = mine ? 0 : -1;
      cell.setAttribute("aria-selected", mine);
    }
    const sizes = `L = ${thousands(depth)}, w = ${thousands(width)}`;
    const what = `${NAMES[chosen.activation] || chosen.activation}, ${chosen.direction} pass`;
    const methods = { ...here().baselines, ...here().methods };
    const verdict = make("p", { className: "map-verdict", id: "map-speedup" });
    if (ratio === null) {
      verdict.append(make("strong", {}, "no ratio"), ` ${reason(depth, width)}`);
    } else {
      const both = `${duration(found[chosen.method].seconds)} instead of ${duration(found[chosen.baseline].seconds)}`;
      verdict.append(make("strong", {}, times(ratio)), ` ${both}${ratio < 1 ? ": the loop is faster" : ""}`);
    }
    const body = make("tbody");
    for (const [name, label] of Object.entries(methods)) {
      const entry = found[name];
      if (!entry) continue;
      const row = make("tr", { "data-column": name });
      if (name === chosen.method || name === chosen.baseline) row.className = "compared";
      const error = typeof entry.error === "number" ? entry.error.toExponential(1) : entry.error;
      const cells = [
        entry.seconds ? duration(entry.seconds) : entry.status,
        chosen.direction === "backward" ? "–" : entry.iterations ?? "–",
        error ?? "–",
      ];
      const chunk = entry.chunk ? make("span", { className: "quiet" }, ` chunk ${entry.chunk}`) : "";
      row.append(make("th", { scope: "row" }, label, chunk));
      cells.forEach((cell, k) => {
        const made = make("td", {}, String(cell));
        if (k === 0 && !entry.seconds) made.className = "status";
        row.append(made);
      });
      body.append(row);
    }
    const heads = ["", "time", "iterations", "error"].map((head) => make("th", { scope: "col" }, head));
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
    readout.replaceChildren(make("h3", {}, `${sizes}: ${what}`), verdict, table);
  }

  // What is chosen

  function choices() {
    const map = here();
    const named = (list) => Object.fromEntries(list.map((name) => [name, NAMES[name] || name]));
    const all = {
      map: Object.fromEntries(maps.map((each, number) => [number, each.label])),
      activation: named(map.activations),
      direction: named(map.directions),
      method: map.methods,
      baseline: map.baselines,
    };
    for (const [name, options] of Object.entries(all)) {
      const select = document.getElementById(`map-${name}`);
      if (!(chosen[name] in options)) chosen[name] = Object.keys(options)[0];
      select.replaceChildren(...Object.entries(options).map(([value, label]) => make("option", { value }, label)));
      select.value = chosen[name];
      select.disabled = Object.keys(options).length < 2;
    }
  }

  root.addEventListener("change", (event) => {
    const name = event.target.id.replace("map-", "");
    chosen[name] = name === "map" ? Number(event.target.value) : event.target.value;
    choices();
    draw();
  });

  grid.addEventListener("click", (event) => {
    const cell = event.target.closest(".map-cell");
    if (!cell) return;
    chosen.cell = [Number(cell.dataset.depth), Number(cell.dataset.width)];
    show();
  });

  grid.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: axes().across.length, ArrowUp: -axes().across.length }[event.key];
    const cells = [...grid.querySelectorAll(".map-cell")], at = cells.indexOf(document.activeElement);
    if (!step || at < 0) return;
    event.preventDefault();
    const columns = axes().across.length, column = (at % columns) + (Math.abs(step) === 1 ? step : 0);
    if (column < 0 || column >= columns || !cells[at + step]) return;
    cells[at + step].focus();
    cells[at + step].click();
  });

  for (const each of [dark, narrow, print]) each.addEventListener("change", draw);
  choices();
  draw();
})();
