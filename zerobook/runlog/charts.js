// Draws the charts of the page as SVG. Each <figure class="chart"> holds its data as JSON; figures.py writes them.

const LEFT = 58, RIGHT = 12, TITLE = 24, GAP = 10, AXIS = 40;  // pixels around the plots
const REACH = 14;  // pixels from which a marker answers to the pointer
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

function element(name, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(name, className, parent, text = "") {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}

// A colour of the page's palette, which has a light and a dark variant, or any colour of CSS.
const colourOf = (curve) => `var(--${curve.colour}, ${curve.colour})`;

// The character that stands for a curve beside its name.
const keyOf = (curve) => curve.symbol || (curve.kind === "dotted" ? "•••" : "━");

function format(value) {
  if (value === null) return "not finite";
  // A step has all its digits.
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 8 });
}

function niceStep(span, count) {
  const size = 10 ** Math.floor(Math.log10(span / count));
  return size * [1, 2, 5, 10].find((factor) => factor * size >= span / count);
}

function multiples(step, [low, high]) {
  const ticks = [];
  for (let number = Math.ceil(low / step); number * step <= high; number += 1) ticks.push(number * step + 0);  // no -0
  return ticks;
}

function logTicks(range) {
  for (const factors of [[1], [1, 3], [1, 2, 5]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(range[0])); power <= Math.log10(range[1]); power += 1) {
      ticks.push(...factors.map((factor) => factor * 10 ** power).filter((tick) => tick >= range[0] && tick <= range[1]));
    }
    if (ticks.length > 2) return ticks.length < 8 ? ticks : ticks.filter((_, index) => index % Math.ceil(ticks.length / 7) === 0);
  }
  return multiples(niceStep(range[1] - range[0], 4), range);
}

// The index of the point whose x is nearest. The points of a curve are in order.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return x - xs[low] < xs[high] - x ? low : high;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    Object.assign(this, JSON.parse(figure.querySelector("script").textContent));
    this.curves = this.panels.flatMap((panel) => panel.curves);
    this.hidden = new Set();
    const xs = this.curves.flatMap((curve) => curve.x);
    const low = xs.reduce((a, b) => Math.min(a, b), Infinity), high = xs.reduce((a, b) => Math.max(a, b), -Infinity);
    const margin = 0.01 * (high - low) || 0.5;
    this.all = xs.length ? [low - margin, high + margin] : [0, 1];
    this.view = this.all;
    this.addLegend();
    this.svg = element("svg", { role: "img", "aria-label": this.panels.map((panel) => panel.title).join(", ") }, figure);
    this.tip = html("div", "tip", figure);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  addLegend() {
    const legend = html("div", "legend", this.figure);
    const named = new Map(this.curves.map((curve) => [curve.name, curve]));
    // A chart whose titles already name its only curves needs no legend.
    if (this.panels.every((panel) => panel.curves.length < 2)) named.clear();
    for (const [name, curve] of named) {
      const button = html("button", "", legend);
      button.type = "button";
      button.ariaPressed = "true";
      const key = html("i", "", button, keyOf(curve));
      key.style.color = colourOf(curve);
      button.append(name);
      button.onclick = () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        button.ariaPressed = String(!this.hidden.has(name));
        this.draw();
      };
    }
    this.reset = html("button", "reset", legend, "show all");
    this.reset.type = "button";
    this.reset.onclick = () => this.show(this.all);
  }

  show(view) {
    this.view = view;
    this.draw();
  }

  visible(panel) {
    return panel.curves.filter((curve) => !this.hidden.has(curve.name));
  }

  toPixel(x) {
    return LEFT + this.width * (x - this.view[0]) / (this.view[1] - this.view[0]);
  }

  toX(pixel) {
    return this.view[0] + (this.view[1] - this.view[0]) * (pixel - LEFT) / this.width;
  }

  // --- drawing
  draw() {
    this.width = Math.max(80, this.figure.clientWidth - LEFT - RIGHT);
    this.reset.hidden = this.view === this.all;
    this.svg.replaceChildren();
    this.tip.hidden = true;
    let top = 0;
    for (const panel of this.panels) {
      this.drawPanel(panel, top + TITLE);
      top += TITLE + panel.height + GAP;
    }
    this.bottom = top - GAP;
    this.drawXLabels();
    this.svg.setAttribute("height", this.bottom + AXIS);
    this.cursor = element("line", { class: "cursor", y1: 0, y2: this.bottom, visibility: "hidden" }, this.svg);
    this.selection = element("rect", { class: "selection", y: 0, height: this.bottom, visibility: "hidden" }, this.svg);
  }

  drawPanel(panel, top) {
    panel.top = top;
    const range = this.valueRange(panel);
    const scale = panel.is_log ? Math.log : (value) => value;
    const share = (value) => (scale(value) - scale(range[0])) / (scale(range[1]) - scale(range[0]));
    panel.toPixel = (value) => top + panel.height * (1 - share(value));
    element("text", { class: "title", x: 0, y: top - 8 }, this.svg, panel.title);
    for (const tick of panel.is_log ? logTicks(range) : multiples(niceStep(range[1] - range[0], 4), range)) {
      const y = panel.toPixel(tick);
      element("line", { class: "grid", x1: LEFT, x2: LEFT + this.width, y1: y, y2: y }, this.svg);
      element("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.svg, format(tick));
    }
    for (const tick of this.xTicks()) {
      element("line", { class: "grid", x1: this.toPixel(tick), x2: this.toPixel(tick), y1: top, y2: top + panel.height }, this.svg);
    }
    // An inner svg cuts off what lies outside of the plot.
    const plot = element("svg", { x: LEFT, y: top, width: this.width, height: panel.height,
                                  viewBox: `${LEFT} ${top} ${this.width} ${panel.height}` }, this.svg);
    const floors = new Map();
    for (const curve of this.visible(panel)) {
      if (curve.kind === "bars") this.drawBars(curve, panel, plot, floors);
      else if (curve.kind === "marks") this.drawMarks(curve, panel, plot);
      else this.drawLine(curve, panel, plot);
    }
  }

  valueRange(panel) {
    const values = [], sums = new Map();
    for (const curve of this.visible(panel)) {
      curve.x.forEach((x, index) => {
        if (x < this.view[0] || x > this.view[1] || curve.y[index] === null) return;
        values.push(curve.y[index]);
        if (curve.kind === "bars") sums.set(x, (sums.get(x) || 0) + curve.y[index]);
      });
    }
    values.push(...sums.values());
    let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!values.length) [low, high] = panel.is_log ? [0.1, 10] : [0, 1];
    if (panel.is_log && low > 0) {
      const factor = (high / low) ** 0.06 * 1.02;
      return [low / factor, high * factor];
    }
    const margin = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
    return [panel.lowest ?? low - margin, panel.largest ?? high + margin];
  }

  xTicks() {
    const span = this.view[1] - this.view[0], count = Math.max(2, this.width / 90);
    const step = this.is_time ? SECONDS.find((seconds) => seconds >= span / count) || niceStep(span, count)
                              : Math.max(1, niceStep(span, count));
    return multiples(step, this.view);
  }

  xText(x, precise) {
    if (!this.is_time) return Math.round(x).toLocaleString("en");
    const iso = new Date(1000 * x).toISOString();
    if (precise) return `${iso.slice(0, 10)} ${iso.slice(11, 19)}`;
    const span = this.view[1] - this.view[0];
    if (span > 4 * 86400) return iso.slice(5, 10);
    return span > 86400 ? `${iso.slice(5, 10)} ${iso.slice(11, 16)}` : iso.slice(11, span > 600 ? 16 : 19);
  }

  drawXLabels() {
    for (const tick of this.xTicks()) {
      // A label at the edge would be cut off.
      const x = Math.min(this.toPixel(tick), LEFT + this.width - 14);
      element("text", { x, y: this.bottom + 16, "text-anchor": "middle" }, this.svg, this.xText(tick));
    }
    const middle = { x: LEFT + this.width / 2, y: this.bottom + 33, "text-anchor": "middle" };
    element("text", middle, this.svg, this.is_time ? "time (UTC)" : "step");
  }

  drawLine(curve, panel, plot) {
    const points = [];
    let path = "", command = "M";
    curve.x.forEach((x, index) => {
      // A line has a gap where its value is not finite.
      if (curve.y[index] === null) {
        command = "M";
        return;
      }
      const point = [this.toPixel(x), panel.toPixel(curve.y[index])];
      points.push(point);
      path += command + point.map((pixel) => pixel.toFixed(1)).join(" ");
      command = "L";
    });
    const dash = curve.kind === "dotted" ? "2 4" : "none";
    element("path", { class: "line", d: path, stroke: colourOf(curve), "stroke-dasharray": dash }, plot);
    // Few points are shown as such: a line of one point would not be seen.
    if (curve.kind === "dotted" || points.length < 3) {
      for (const [cx, cy] of points) element("circle", { cx, cy, r: 3, fill: colourOf(curve) }, plot);
    }
  }

  drawMarks(curve, panel, plot) {
    curve.x.forEach((x, index) => {
      // Where the height is not known, the event is marked at the foot of the plot.
      const value = curve.y[index];
      const y = value === null ? panel.top + panel.height - 8 : Math.max(panel.toPixel(value), panel.top + 8);
      element("text", { class: "mark", x: this.toPixel(x), y, style: `fill: ${colourOf(curve)}` }, plot, curve.symbol);
    });
  }

  drawBars(curve, panel, plot, floors) {
    const middle = (index) => (curve.x[index - 1] + curve.x[index]) / 2;
    const last = curve.x.length - 1;
    const edges = curve.x.map((_, index) => middle(index));
    edges[0] = last > 0 ? 2 * curve.x[0] - edges[1] : curve.x[0] - 0.5;
    edges.push(last > 0 ? 2 * curve.x[last] - edges[last] : curve.x[0] + 0.5);
    const path = curve.x.map((x, index) => {
      const floor = floors.get(x) || 0;
      floors.set(x, floor + curve.y[index]);
      const [left, right] = [this.toPixel(edges[index]), this.toPixel(edges[index + 1])];
      return `M${left} ${panel.toPixel(floor)}V${panel.toPixel(floor + curve.y[index])}H${right}V${panel.toPixel(floor)}Z`;
    });
    element("path", { d: path.join(""), fill: colourOf(curve) }, plot);
  }

  // --- the pointer
  listen() {
    let start = null;
    const at = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [Math.min(Math.max(event.clientX - box.x, LEFT), LEFT + this.width), event.clientY - box.y];
    };
    this.svg.addEventListener("pointerdown", (event) => {
      start = { pixel: at(event)[0], view: this.view, isPan: event.shiftKey };
      this.svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    this.svg.addEventListener("pointermove", (event) => {
      const [pixel, y] = at(event);
      if (start === null) this.hover(pixel, y);
      else if (start.isPan) {
        const shift = (start.view[1] - start.view[0]) * (start.pixel - pixel) / this.width;
        this.show([start.view[0] + shift, start.view[1] + shift]);
      } else this.select(start.pixel, pixel);
    });
    this.svg.addEventListener("pointerup", (event) => {
      const [pixel, y] = at(event);
      const ends = start === null ? [] : [start.pixel, pixel].sort((a, b) => a - b);
      const isZoom = start !== null && !start.isPan && ends[1] - ends[0] > 5;
      start = null;
      this.selection.setAttribute("visibility", "hidden");
      if (isZoom) this.show(ends.map((end) => this.toX(end)));
      else this.hover(pixel, y);
    });
    this.svg.addEventListener("pointercancel", () => { start = null; this.draw(); });
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("dblclick", () => this.show(this.all));
  }

  select(from, to) {
    const place = { x: Math.min(from, to), width: Math.abs(to - from), visibility: "visible" };
    for (const [key, value] of Object.entries(place)) this.selection.setAttribute(key, value);
  }

  leave() {
    this.tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
  }

  // Says the values of the panel under the pointer.
  hover(pixel, y) {
    const panel = this.panels.find((one) => y <= one.top + one.height + GAP) || this.panels.at(-1);
    const lines = [];
    let snapped = null;
    for (const curve of this.visible(panel).filter((one) => one.x.length)) {
      if (curve.kind === "marks") {
        curve.x.forEach((x, index) => {
          if (Math.abs(this.toPixel(x) - pixel) < REACH) lines.push([curve, curve.texts[index]]);
        });
        continue;
      }
      const index = nearest(curve.x, this.toX(pixel));
      const distance = Math.abs(this.toPixel(curve.x[index]) - pixel);
      if (snapped === null || distance < snapped.distance) snapped = { distance, x: curve.x[index] };
      const isNear = distance < 40 || (curve.x[0] <= this.toX(pixel) && this.toX(pixel) <= curve.x.at(-1));
      if (isNear) lines.push([curve, `${curve.name}: ${format(curve.y[index])}`]);
    }
    if (!lines.length) return this.leave();
    const x = snapped === null ? this.toX(pixel) : snapped.x;
    this.tip.replaceChildren();
    html("b", "", this.tip, this.is_time ? this.xText(x, true) : `step ${this.xText(x)}`);
    for (const [curve, text] of lines) {
      const line = html("div", "", this.tip);
      html("i", "", line, keyOf(curve)).style.color = colourOf(curve);
      line.append(text);
    }
    this.cursor.setAttribute("x1", this.toPixel(x));
    this.cursor.setAttribute("x2", this.toPixel(x));
    this.cursor.setAttribute("visibility", "visible");
    this.tip.hidden = false;
    // Beside the pointer, on the side that has room.
    const isRight = pixel > this.figure.clientWidth / 2;
    this.tip.style.left = isRight ? "auto" : `${pixel + 14}px`;
    this.tip.style.right = isRight ? `${this.figure.clientWidth - pixel + 14}px` : "auto";
    this.tip.style.top = `${this.svg.offsetTop + panel.top}px`;
  }
}

for (const figure of document.querySelectorAll("figure.chart")) {
  if (!figure.chart) figure.chart = new Chart(figure);
}
