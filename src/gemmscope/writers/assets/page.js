/* Draws the charts of the page from its JSON data, with their legends; sorts tables, switches tabs, copies text. */
(() => {
  const { colour, readTheme, face, fields, few, total, ms, height, options } = CHARTS;
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = [];
  const make = (tag, content = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: content, ...properties });

  // --- legends ------------------------------------------------------------------------------------------------------------

  const STROKES = { "/": "M-2,6L6,-2M0,12L12,0M6,14L14,6", "\\": "M-2,6L6,14M0,0L12,12M6,-2L14,6", "-": "M0,3H12M0,9H12", "|": "M3,0V12M9,0V12", ".": "M3,3h.01M9,3h.01M6,6h.01M3,9h.01M9,9h.01" };

  /* A small square with the face of a bar. */
  function swatch(style) {
    const element = (name, attributes) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return node;
    };
    const image = element("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" });
    image.append(element("rect", { width: 12, height: 12, fill: style.fill, stroke: style.hatch === "/" ? style.edge : "none" }));
    if (STROKES[style.hatch]) image.append(element("path", { d: STROKES[style.hatch], stroke: style.over, "stroke-width": style.hatch === "." ? 2 : 1, "stroke-linecap": "round", fill: "none" }));
    return image;
  }

  /* Which face is what; of one or two bars also the times. */
  function barLegend(spec, theme, add) {
    const shade = (name) => spec.bars.flatMap((bar) => bar.segments).find((part) => part.name === name).shade;
    const bars = spec.bars.filter((bar) => bar.segments.length);
    const time = (bar, name) => bar.segments.filter((part) => part.name === name).reduce((sum, part) => sum + part.time_ms, 0);
    for (const [name, key] of spec.legend) {
      const own = face(theme, colour(key), (spec.shapes[key] || {}).hatch, shade(name) === "hatched" ? "hatched" : "plain");
      const values = few(spec) ? bars.map((bar) => (time(bar, name) ? ms(time(bar, name)) : "-")) : [];
      if (few(spec) && bars.length === 1) values.push(`${(100 * time(bars[0], name) / total(bars[0])).toFixed(1)}%`);
      add(name, swatch(own), values);
    }
    if (spec.bars.some((bar) => bar.segments.some((part) => part.shade === "light"))) {
      const grey = colour("mark-total");
      add("fprop + dgrad", swatch(face(theme, grey, "", "plain")));
      add("wgrad (lighter, dotted)", swatch(face(theme, grey, "", "light")));
    }
  }

  function heatLegend(spec, add) {
    if (spec.best) {
      const cell = spec.cells[spec.best[1]][spec.best[0]];
      add(`\u2605 best: ${cell.text} at ${spec.row_name} ${spec.rows[spec.best[1]]}, ${spec.column_name} ${spec.columns[spec.best[0]]}`);
    }
    if (new Set(fields(spec).map((cell) => cell.certain)).size > 1) add(`${spec.line}: ${spec.line_meaning}`, make("i"));
    for (const [mark, meaning] of spec.legend) add(`${mark}: ${meaning}`);
  }

  function legend(plot, spec, theme) {
    if (spec.type !== "bars" && spec.type !== "heat") return;
    const list = make("ul", "", { className: "legend" });
    const add = (name, image, values = []) => {
      const item = list.appendChild(document.createElement("li"));
      item.append(...(image ? [image] : []), make("span", name), ...values.map((value) => make("b", value)));
    };
    const below = spec.type === "bars" && few(spec);
    if (spec.type === "bars") barLegend(spec, theme, add);
    else heatLegend(spec, add);
    if (below) {
      list.classList.add("values");
      const bars = spec.bars.filter((bar) => bar.segments.length);
      list.classList.add(bars.length > 1 ? "two" : "one");
      if (bars.length > 1) {
        const heads = make("li", "", { className: "aside" });
        heads.append(make("span", ""), ...bars.map((bar) => make("b", bar.label)));
        list.prepend(heads);
      }
    }
    const old = [plot.previousElementSibling, plot.nextElementSibling].find((element) => element && element.classList.contains("legend"));
    if (old) old.replaceWith(list);
    else if (below) plot.after(list);
    else plot.before(list);
  }

  // --- drawing, again when the window or the theme changes ----------------------------------------------------------------

  const paper = matchMedia("print");
  let printing = false; // sheets are counted before the style of paper applies
  const onPaper = () => printing || paper.matches;
  const WIDTHS_ON_PAPER = [700, 460]; // alone, and beside another; then scaled to the page

  function draw(place) {
    const plot = plots[place];
    const spec = specs[Number(plot.dataset.chart)];
    const theme = readTheme();
    drawn[place] = drawn[place] || echarts.init(plot, null, { renderer: "svg", width: 100, height: 100 });
    const tall = spec.type === "bars" && !few(spec) && !onPaper() && innerWidth >= 1024 && plot.closest(".beside") ? 80 : 0;
    const high = height(spec) + tall;
    if (!onPaper()) plot.style.height = `${high}px`;
    const figure = plot.closest("figure");
    const alone = !figure.parentElement.querySelector(":scope > figure + figure");
    const width = onPaper() ? WIDTHS_ON_PAPER[alone ? 0 : 1] : plot.clientWidth;
    drawn[place].resize({ width, height: high });
    drawn[place].setOption(options[spec.type](spec, theme, width, plot), true);
    plot.querySelector("svg").setAttribute("viewBox", `0 0 ${width} ${high}`);
    legend(plot, spec, theme);
  }
  function drawAll() {
    plots.forEach((_, place) => draw(place));
    document.documentElement.dataset.drawn = onPaper() ? "paper" : String(innerWidth); // for whoever waits for it
  }
  drawAll();
  let waiting = 0;
  const later = () => { clearTimeout(waiting); if (!onPaper()) waiting = setTimeout(drawAll, 80); };
  addEventListener("resize", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  paper.addEventListener("change", drawAll);
  for (const [when, state] of [["beforeprint", true], ["afterprint", false]]) addEventListener(when, () => { printing = state; drawAll(); });

  // --- sorting ------------------------------------------------------------------------------------------------------------

  const NOTHING = new Set(["-", ""]);
  function sort(heading) {
    const table = heading.closest("table");
    const column = [...heading.parentNode.children].indexOf(heading);
    const rising = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const key = (row) => { const cell = row.cells[column]; return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent; };
    const compare = (one, other) => {
      const [a, b] = [key(one), key(other)];
      const missing = NOTHING.has(a) - NOTHING.has(b); // what has no value stays last either way
      if (missing) return missing;
      const numbers = typeof a === "number" && typeof b === "number";
      return rising * (numbers ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    };
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", rising === 1 ? "ascending" : "descending");
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(compare));
  }
  for (const button of document.querySelectorAll(".sortable th button")) button.addEventListener("click", () => sort(button.closest("th")));

  // --- tabs: one framework's settings at a time -----------------------------------------------------------------------------

  for (const list of document.querySelectorAll("[role=tablist]")) {
    const tabs = [...list.children];
    const choose = (chosen) => tabs.forEach((tab) => {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
    });
    const move = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    };
    for (const tab of tabs) { tab.addEventListener("click", () => choose(tab)); tab.addEventListener("keydown", move); }
    choose(tabs[0]);
  }

  // --- copying: the clipboard's own way, or the old one where a page from a file may not use it -----------------------------

  async function copy(button) {
    const code = button.closest(".paste, .command").querySelector("code");
    let done = false;
    try {
      await navigator.clipboard.writeText(code.textContent);
      done = true;
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      const chosen = getSelection();
      chosen.removeAllRanges();
      chosen.addRange(range);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }
  for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
})();
