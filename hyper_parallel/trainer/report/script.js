"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const H = 230, L = 58, R = 10, T = 8, B = 24;
const state = { smooth: 0, log: {} };
const short = v => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e")
  : String(+v.toPrecision(5));
const tick = v => Math.abs(v) >= 1e9 ? +(v / 1e9).toPrecision(3) + "G" : Math.abs(v) >= 1e6 ? +(v / 1e6).toPrecision(3) + "M"
  : Math.abs(v) >= 1e4 ? +(v / 1e3).toPrecision(3) + "k" : v === 0 ? "0" : Math.abs(v) < 1e-3 ? v.toExponential(0) : String(+v.toPrecision(4));
const text = s => String(s).replace(/[&<>"]/g, c => "&#" + c.charCodeAt(0) + ";");

function points(series) {
  let x = 0;
  return series.dx.map((d, i) => [x += d, series.y[i]]).filter(p => p[1] !== null);
}
function smoothed(list, weight) {
  let mean = 0, part = 0;
  return list.map(([x, y]) => { mean = weight * mean + (1 - weight) * y; part = weight * part + 1 - weight; return [x, mean / part]; });
}
function ticks(low, high, isLog) {
  const found = [];
  if (isLog) {
    const decades = Math.log10(high / low);
    const of = decades > 2 ? [1] : decades > 0.7 ? [1, 2, 5] : null;
    if (of) {
      for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
        for (const m of of) { const v = m * 10 ** e; if (v >= low && v <= high) found.push(v); }
      return found;
    }
  }
  const raw = (high - low) / 4 || 1, base = 10 ** Math.floor(Math.log10(raw));
  const size = base * [1, 2, 5, 10].find(m => m * base >= raw * 0.999);
  for (let v = Math.ceil(low / size); v * size <= high + size * 1e-9; v++) found.push(v * size);
  return found;
}
function view(chart) {
  const W = chart.width;
  const isLog = !!state.log[chart.id];
  const lists = chart.series.map(s => points(s).filter(p => !isLog || p[1] > 0));
  const all = lists.flat(), ys = all.map(p => p[1]), xs = all.map(p => p[0]);
  const least = (a, f) => a.reduce((m, v) => f(m, v), a[0]);
  let low = least(ys, Math.min), high = least(ys, Math.max);
  const first = least(xs, Math.min), last = least(xs, Math.max);
  if (isLog) { const room = (high / low) ** 0.05 || 1; low /= room; high *= room; if (low === high) { low /= 2; high *= 2; } }
  else { const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1; low = chart.zero ? Math.min(0, low) : low - room; high += room; }
  const part = v => isLog ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
  return { isLog, lists, W, low, high, first, last, x: v => L + (W - L - R) * (last > first ? (v - first) / (last - first) : 0.5),
    y: v => H - B - (H - T - B) * part(v) };
}
const path = (v, list) => list.map(([x, y], i) => (i ? "L" : "M") + v.x(x).toFixed(1) + " " + v.y(y).toFixed(1)).join("");

function draw(chart) {
  const v = view(chart), out = [];
  if (!v.lists.flat().length) { document.getElementById(chart.id).innerHTML = ""; return; }
  for (const at of ticks(v.low, v.high, v.isLog)) {
    const y = v.y(at).toFixed(1);
    out.push(`<line class="grid" x1="${L}" x2="${v.W - R}" y1="${y}" y2="${y}"/><text class="axis" x="${L - 7}" y="${+y + 4}" text-anchor="end">${tick(at * (chart.scale || 1))}${chart.unit || ""}</text>`);
  }
  for (const at of ticks(v.first, v.last, false))
    if (Number.isInteger(at)) out.push(`<text class="axis" x="${v.x(at).toFixed(1)}" y="${H - 6}" text-anchor="middle">${tick(at)}</text>`);
  chart.series.forEach((s, i) => {
    const list = v.lists[i], colour = `var(--c${s.colour})`, soft = state.smooth > 0 && !s.dots;
    out.push(`<path class="${soft ? "raw" : ""}" data-name="${text(s.name)}" d="${path(v, list)}" fill="none" stroke="${colour}" stroke-width="1.7" stroke-linejoin="round"${s.dashed ? ' stroke-dasharray="7 5"' : ""}/>`);
    if (soft) out.push(`<path d="${path(v, smoothed(list, state.smooth))}" fill="none" stroke="${colour}" stroke-width="2"/>`);
    if (s.dots || list.length === 1) for (const [x, y] of list.slice(-200)) out.push(`<circle cx="${v.x(x).toFixed(1)}" cy="${v.y(y).toFixed(1)}" r="3" fill="${colour}"/>`);
  });
  document.getElementById(chart.id).innerHTML = out.join("") + `<line class="mark" id="${chart.id}-mark" y1="${T}" y2="${H - B}" visibility="hidden"/>`;
}
function hover(chart, event) {
  const svg = document.getElementById(chart.id), tip = document.getElementById(chart.id + "-tip"), v = view(chart);
  const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * v.W;
  const near = v.lists.map(list => list.reduce((best, p) => best && Math.abs(v.x(best[0]) - at) <= Math.abs(v.x(p[0]) - at) ? best : p, null));
  const closest = near.filter(p => p).reduce((best, p) => best && Math.abs(v.x(best[0]) - at) <= Math.abs(v.x(p[0]) - at) ? best : p, null);
  if (!closest) return;
  const mark = document.getElementById(chart.id + "-mark"), x = v.x(closest[0]);
  mark.setAttribute("x1", x); mark.setAttribute("x2", x); mark.setAttribute("visibility", "visible");
  tip.textContent = ["step " + closest[0], ...chart.series.map((s, i) => near[i] && near[i][0] === closest[0] ? s.name + " " + short(near[i][1] * (chart.scale || 1)) + (chart.unit || "") : "").filter(Boolean)].join("\n");
  tip.hidden = false;
  const left = x / v.W * box.width;
  tip.style.left = (left > box.width * 0.6 ? left - tip.offsetWidth - 10 : left + 10) + "px";
  tip.style.top = "2rem";
}
for (const chart of data.charts) {
  draw(chart);
  const svg = document.getElementById(chart.id), button = document.getElementById(chart.id + "-log");
  svg.addEventListener("mousemove", event => hover(chart, event));
  svg.addEventListener("mouseleave", () => {
    document.getElementById(chart.id + "-tip").hidden = true;
    document.getElementById(chart.id + "-mark").setAttribute("visibility", "hidden");
  });
  button.addEventListener("click", () => {
    state.log[chart.id] = !state.log[chart.id];
    button.setAttribute("aria-pressed", String(state.log[chart.id]));
    draw(chart);
  });
}
document.getElementById("smooth").addEventListener("input", event => {
  state.smooth = +event.target.value;
  data.charts.forEach(draw);
});
