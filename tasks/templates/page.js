"use strict";
// Charts: each .chart holds its data as JSON, as `chart` of tasks/html.py writes it.
const UNITS = { "": 1, K: 1e3, M: 1e6, B: 1e9, T: 1e12 };
const short = (value) => {
  if (value == null) return "";
  const size = Math.abs(value);
  for (const [unit, scale] of Object.entries(UNITS).reverse())
    if (size >= scale && scale > 1) return +(value / scale).toPrecision(4) + unit;
  return size !== 0 && size < 1e-3 ? value.toExponential(2).replace(/\.?0*e/, "e") : String(+value.toPrecision(4));
};
// 4Ki, as a recipe writes it
const binary = (value) => {
  if (value == null) return "";
  const power = [3, 2, 1].find((power) => value >= 1024 ** power && value % 1024 ** power === 0) ?? 0;
  return value / 1024 ** power + ["", "Ki", "Mi", "Gi"][power];
};
// The marks of an axis have one unit and one number of digits.
function labels(ticks) {
  const shown = ticks.filter((tick) => tick != null), most = Math.max(...shown.map(Math.abs));
  const exponent = Math.floor(Math.log10(most));
  const [unit, scale] = most && most < 1e-3 ? [`e${exponent}`, 10 ** exponent]
    : Object.entries(UNITS).reverse().find(([, size]) => most >= size) ?? ["", 1];
  const gap = Math.abs((shown[1] ?? 0) - shown[0]) / scale;
  let digits = 0;
  while (digits < 6 && Math.abs(gap * 10 ** digits - Math.round(gap * 10 ** digits)) > 1e-6) digits += 1;
  return ticks.map((tick) => tick == null ? "" : tick === 0 ? "0" : (tick / scale).toFixed(digits) + unit);
}

function marks(plot, stages) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.fillStyle = ctx.strokeStyle = color("--faint");
  ctx.setLineDash([3 * ratio, 4 * ratio]);
  ctx.textAlign = "center";
  for (const { start, end, name } of stages) {
    const left = Math.max(plot.valToPos(start, "x", true), bbox.left);
    const right = Math.min(plot.valToPos(end, "x", true), bbox.left + bbox.width);
    if (start > plot.scales.x.min && left < bbox.left + bbox.width) {
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    if (right - left > ctx.measureText(name).width) ctx.fillText(name, (left + right) / 2, bbox.top - 5 * ratio);
  }
  ctx.restore();
}

const color = (name) => name.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(name) : name;

const last = (plot) => plot.setLegend({ idx: plot.data[0].length - 1 });

function draw(box) {
  const chart = JSON.parse(box.querySelector("script").textContent);
  // The curves' positions differ: where one has no point, its last value so far counts.
  const shown = (plot, value, place, at) => {
    while (value == null && at > 0) value = plot.data[place][--at];
    return (chart.log2 ? binary : short)(value);
  };
  const grid = { stroke: () => color("--line"), width: 1 }, ink = () => color("--faint");
  const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui, sans-serif" };
  const size = () => ({ width: box.clientWidth, height: Math.max(220, Math.min(320, box.clientWidth * 0.45)) });
  const paths = { steps: uPlot.paths.stepped({ align: -1 }) };
  const options = {
    ...size(),
    padding: [18, 14, 0, 0],
    scales: {
      // all charts of a page have one span, so that they are enlarged together
      x: { time: false, range: (plot, low, high) => {
        const times = plot.data[0];
        const whole = chart.stages.length && (times.length < 2 || (low === times[0] && high === times.at(-1)));
        return whole ? [chart.stages[0].start, chart.stages.at(-1).end] : [low, high];
      } },
      y: chart.log2 ? { distr: 3, log: 2, range: (_, low, high) => [2 ** (Math.ceil(Math.log2(low)) - 1), 2 ** (Math.floor(Math.log2(high)) + 1)] } : { range: (_, low, high) => {
        const room = (high - low || Math.abs(high) || 1) * 0.06;
        return [chart.zero ? Math.min(0, low) : low - room, high + room];
      } },
    },
    cursor: { sync: { key: "tokens" }, points: { size: 6 } },
    legend: { markers: { width: 0, fill: (_, place) => place ? color(chart.curves[place - 1].color) : "transparent" } },
    axes: [
      { ...axis, values: (_, ticks) => labels(ticks), space: 70, size: 32 },
      { ...axis, values: (_, ticks) => chart.log2 ? ticks.map(binary) : labels(ticks), size: 64, label: chart.unit, labelFont: axis.font, labelSize: 20 },
    ],
    series: [
      { label: "tokens", value: (_, value) => short(value) },
      ...chart.curves.map((curve) => ({
        label: curve.label, stroke: () => color(curve.color), width: curve.thin ? 1 : 2, spanGaps: true,
        value: shown, points: { show: curve.dots, size: 5 },
        ...(curve.steps && { paths: paths.steps }),
      })),
    ],
    hooks: { draw: [(plot) => marks(plot, chart.stages)], ready: [last], setData: [last] },
  };
  const plot = new uPlot(options, uPlot.join(chart.curves.map((curve) => [curve.x, curve.y])), box);
  plot.over.addEventListener("mouseleave", () => last(plot));
  plot.root.title = "Drag over a span to enlarge it, double-click to see all again. A click on a name hides its curve.";
  new ResizeObserver(() => plot.setSize(size())).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  plot.update = (next) => {  // the live page: new points, while an enlarged span stays
    const same = next.curves.length === chart.curves.length, { min, max } = plot.scales.x;
    const enlarged = chart.stages.length && (min > chart.stages[0].start || max < chart.stages.at(-1).end);
    if (!same) return false;
    Object.assign(chart, next);
    plot.setData(uPlot.join(chart.curves.map((curve) => [curve.x, curve.y])), !enlarged);
    return true;
  };
  return plot;
}
const plots = [...document.querySelectorAll(".chart")].map(draw);
// Paper is white: the canvases keep their pixels, so they are drawn again in the colors of the light scheme.
for (const event of ["beforeprint", "afterprint"])
  addEventListener(event, () => {
    document.documentElement.classList.toggle("print", event === "beforeprint");
    for (const part of document.querySelectorAll("details.paper")) {
      if (event === "beforeprint") part.dataset.open = part.open ? "1" : "";
      part.open = event === "beforeprint" || Boolean(part.dataset.open);
    }
    plots.forEach((plot) => plot.redraw());
  });

// A link to a heading opens what is folded under it.
function unfold(id) {
  let next = document.getElementById(id)?.nextElementSibling;
  while (next && !["H2", "DETAILS"].includes(next.tagName)) next = next.nextElementSibling;
  if (next?.tagName === "DETAILS") next.open = true;
}
addEventListener("hashchange", () => unfold(location.hash.slice(1)));
unfold(location.hash.slice(1));

// MLflow shows the page from a blob: address in a sandbox, where links to a place of the page do nothing and links to
// other files open an empty page.
if (location.protocol === "blob:")
  for (const link of document.querySelectorAll("a[href]")) {
    const target = link.getAttribute("href");
    if (target.startsWith("#"))
      link.addEventListener("click", (event) => {
        event.preventDefault();
        unfold(target.slice(1));
        document.getElementById(target.slice(1)).scrollIntoView();
      });
    else if (!/^[a-z]+:/.test(target)) link.replaceWith(...link.childNodes);
  }

// Tables: a click on a column's head sorts, the third restores the order; a long table shows its first rows and a button.
// On a narrow screen a row with text becomes a card, where each value has its head above it.
const ROWS = 20;
function amount(cell) {
  const text = (cell.dataset.value ?? cell.textContent).replaceAll(",", "").trim();
  const found = /^([-+]?\d*\.?\d+(?:e[-+]?\d+)?) ?([KMBT])?/i.exec(text);
  return found ? Number(found[1]) * UNITS[(found[2] ?? "").toUpperCase()] : null;
}
function compare(first, second) {
  const [a, b] = [amount(first), amount(second)];
  if (a !== null && b !== null) return a - b;
  if (a === null && b === null) return first.textContent.localeCompare(second.textContent);
  return a === null ? 1 : -1;
}
for (const table of document.querySelectorAll(".wide table")) {
  const [head, ...rows] = table.rows;
  if (!head || [...head.cells].some((cell) => cell.tagName !== "TH") || table.classList.contains("two-line")) continue;
  const body = table.tBodies[0];
  const worded = (row) => row.cells.length > 2 && row.querySelector("td.text")?.textContent.trim();
  if (!table.classList.contains("first") && rows.some(worded)) {
    table.classList.add("cards");
    for (const row of rows)
      [...row.cells].forEach((cell, column) => { cell.dataset.head = head.cells[column]?.textContent ?? ""; });
  }
  if (rows.length > 2)
    [...head.cells].forEach((cell, column) => {
      if (!cell.textContent.trim()) return;
      const sort = () => {
        const next = { none: "ascending", ascending: "descending", descending: "none" }[cell.ariaSort];
        for (const other of head.cells) if (other.ariaSort) other.ariaSort = "none";
        cell.ariaSort = next;
        const sign = { none: 0, ascending: 1, descending: -1 }[next];  // 0 keeps the order of the page
        const order = [...rows].sort((a, b) => sign * compare(a.cells[column], b.cells[column]));
        body.append(...order);
        fold(order);
      };
      cell.ariaSort = "none";
      cell.tabIndex = 0;
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();  // the space key scrolls
        sort();
      });
    });
  let folded = rows.length > ROWS * 1.5;
  const fold = (order) => order.forEach((row, place) => { row.hidden = folded && place >= ROWS; });
  if (folded) {
    const more = document.createElement("button");
    more.className = "more";
    more.textContent = `show all ${rows.length} rows`;
    more.addEventListener("click", () => { folded = false; fold(rows); more.remove(); });
    table.parentElement.after(more);
    fold(rows);
  }
}
