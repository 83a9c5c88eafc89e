// Line charts: uPlot with the page's colours. A drag zooms, a double click shows everything again.
// uPlot has no minified ES module; its script runs before this one and defines a global (index.html).

import { css, duration, h, number, onTheme, percent, rate } from "./dom.js";

const HEIGHT = 150;
const AXES = { step: "step", "throughput/samples": "samples", time_s: "time" };
const FORMATS = { number, share: percent, rate };
const charts = new Set();

onTheme(() => charts.forEach((chart) => chart.rebuild()));
new ResizeObserver(() => charts.forEach((chart) => chart.resize())).observe(document.body);

// A choice of the horizontal axis; `onChoice` gets its key.
export function axisPicker(onChoice) {
  const axes = h("select", { "aria-label": "Horizontal axis", onchange: () => onChoice(axes.value) },
    Object.entries(AXES).map(([key, name]) => h("option", { value: key }, name)));
  return h("label", {}, "Curves over ", axes);
}

export class Chart {
  // series: [{label, colour: "--c0", points}]; y: {format, min, max}; onZoom(min, max) when the user
  // has chosen a part of the x axis, and onZoom(null) for all of it
  constructor({ title, unit = "", series, y = {}, axis = "step", height = HEIGHT, onZoom = () => {} }) {
    Object.assign(this, { series, y, axis, height, onZoom, data: [[], ...series.map(() => [])] });
    this.plot = null;
    this.zoomed = null; // [min, max]
    this.holder = h("div", { class: "plot", ondblclick: () => { charts.forEach((chart) => { chart.zoomed = null; }); this.onZoom(null); } });
    this.value = h("span", { class: "value" });
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", {}, title, unit && h("small", {}, ` ${unit}`)), this.value),
      this.holder);
    charts.add(this);
  }

  set(axis, data) {
    this.axis = axis;
    this.data = data.map((column) => column.map((v) => (v === undefined ? null : v)));
    if (!this.plot || this.plot.axisName !== axis) this.rebuild();
    else {
      this.plot.setData(this.data, this.zoomed === null);
      if (this.zoomed) this.plot.setScale("x", { min: this.zoomed[0], max: this.zoomed[1] });
    }
    this.showLast();
  }

  showLast(index = null) {
    const format = FORMATS[this.y.format ?? "number"];
    const parts = this.series.map((series, i) => {
      const column = this.data[i + 1] ?? [];
      const found = index === null ? column.findLast((v) => v !== null) : column[index];
      const name = this.series.length > 1 ? `${series.label} ` : "";
      const key = h("i", { style: { "background-color": `var(${series.colour})` } });
      return h("span", {}, this.series.length > 1 && key, name, h("b", {}, format(found)));
    });
    const at = index === null ? "" : h("span", { class: "at" }, this.xText(this.data[0][index]));
    this.value.replaceChildren(...[at, ...parts].filter(Boolean));
  }

  xText(value) {
    const text = this.axis === "time_s" ? duration(value) : Math.round(value);
    return `${AXES[this.axis]} ${text}`;
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = this.zoomed = null;
    const width = this.holder.clientWidth;
    if (!width) return;
    const format = FORMATS[this.y.format ?? "number"];
    const line = { stroke: css("--line"), width: 1 };
    const axis = { stroke: css("--dim"), font: "11px system-ui", grid: line, ticks: { ...line, size: 4 } };
    const isTime = this.axis === "time_s";
    const { min = null, max = null } = this.y;
    this.plot = new uPlot({
      width, height: this.height, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { sync: { key: "charts" }, y: false, points: { size: 5 } },
      hooks: {
        setSelect: [(plot) => {
          const [from, to] = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
          if (to > from) this.onZoom(...(this.zoomed = [from, to]));
        }],
        setCursor: [(plot) => this.showLast(plot.cursor.idx ?? null)],
      },
      scales: {
        x: { time: false },
        y: { range: (_, low, high) => range(low, high, min, max) },
      },
      axes: [
        { ...axis, size: 26, values: (_, ticks) => ticks.map((t) => (isTime ? duration(t) : trimmed(rate(t)))) },
        { ...axis, size: 46, values: (_, ticks) => ticks.map((t) => trimmed(format(t))) },
      ],
      series: [{}, ...this.series.map((s) => ({
        label: s.label, stroke: css(s.colour), width: 1.5, dash: s.dash, spanGaps: true,
        points: { show: s.points ?? false, size: 5, fill: css(s.points ? "--back" : s.colour) },
      }))],
    }, this.data, this.holder);
    this.plot.axisName = this.axis;
  }

  resize() {
    const width = this.holder.clientWidth;
    if (!width) return;
    if (!this.plot) this.rebuild();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: this.height });
  }

  destroy() {
    charts.delete(this);
    this.plot?.destroy();
  }
}

function range(low, high, min, max) {
  if (low === null || high === null) return [min ?? 0, max ?? 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [Math.min(min ?? low - room, low), Math.max(max ?? high + room, high)];
}

function trimmed(text) {
  return text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}
