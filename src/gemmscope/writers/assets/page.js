"use strict";
/* Draws the charts of the page from its JSON data, sorts tables, copies text. Text from a run file reaches the page as text, never
   as markup. */
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = [];

  // --- looks: colours come from the style sheet, so that light, dark and paper are defined in one place --------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function looks() {
    const get = (...names) => Object.fromEntries(names.map((name) => [name, colour(name)]));
    const ops = Array.from({ length: 8 }, (_, index) => colour(`c${index}`));
    return { ...get("paper", "ink", "soft", "line", "faint", "alarm", "rest", "dark", "down", "up"), ops, font: colour("sans") };
  }

  function mixed(first, second, share) {
    const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    const [a, b] = [parts(first), parts(second)];
    return `rgb(${a.map((value, index) => Math.round(value * share + b[index] * (1 - share))).join(",")})`;
  }

  const hatching = (look) => ({
    symbol: "rect", dashArrayX: [1, 0], dashArrayY: [1, 4], rotation: -Math.PI / 4, color: look.dark, symbolSize: 1,
  });

  // --- what is shown on hover ---------------------------------------------------------------------------------------------

  function tip(title, facts) {
    const box = document.createElement("div");
    box.append(Object.assign(document.createElement("b"), { textContent: title }));
    const list = box.appendChild(document.createElement("dl"));
    for (const [name, value] of facts) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }));
      list.append(Object.assign(document.createElement("dd"), { textContent: value }));
    }
    return box;
  }

  /* Beside what is pointed at, so that it stays in sight; on a phone below it. */
  function beside(plot, at, box) {
    const frame = plot.getBoundingClientRect();
    const room = document.documentElement.clientWidth;
    const [width, height] = [box.offsetWidth, box.offsetHeight];
    const fits = (x) => frame.left + x >= 4 && frame.left + x + width <= room - 4;
    const x = [at[0] + 18, at[0] - width - 18].find(fits);
    if (x === undefined) return [Math.max(4, Math.min(room - width - 4, frame.left + at[0] - width / 2)) - frame.left, at[1] + 22];
    return [x, Math.max(4, Math.min(innerHeight - height - 4, frame.top + at[1] - height / 2)) - frame.top];
  }

  function base(look, plot) {
    return {
      animation: false,
      textStyle: { fontFamily: look.font, color: look.ink },
      tooltip: {
        trigger: "item", position: (at, _, box) => beside(plot, at, box), className: "tip", backgroundColor: look.paper, borderColor: look.soft, borderWidth: 1,
        padding: [6, 9], transitionDuration: 0, textStyle: { color: look.ink, fontFamily: look.font, fontSize: 12 },
        formatter: (at) => (at.data && at.data.facts ? tip(at.data.title, at.data.facts) : ""),
      },
    };
  }

  const axis = (look) => ({
    axisLine: { lineStyle: { color: look.soft } }, axisTick: { show: false }, axisLabel: { color: look.ink, fontSize: 12 },
    splitLine: { lineStyle: { color: look.line } }, nameTextStyle: { color: look.soft, fontSize: 11.5 },
  });

  // --- the kinds of charts ------------------------------------------------------------------------------------------------

  /* One stacked bar per recipe; its speedup, interval and time above it. */
  function bars(spec, look, width, plot) {
    const keys = [];
    for (const bar of spec.bars) {
      for (const part of bar.segments) {
        const key = `${part.name}/${part.shade}`;
        if (!keys.includes(key)) keys.push(key);
      }
    }
    const shape = (part) => {
      const own = colour(part.color);
      if (part.shade === "hatched") return { color: look.paper, decal: hatching(look), borderColor: look.dark, borderWidth: 0.8 };
      return { color: part.shade === "light" ? mixed(own, look.paper, 0.5) : own, borderColor: look.paper, borderWidth: 0.6 };
    };
    // several small ops may share one name: they are stacked as one series with the sum, and the facts of the first
    const datum = (bar, key) => {
      const parts = bar.segments.filter((part) => `${part.name}/${part.shade}` === key);
      if (!parts.length) return "-";
      const value = parts.reduce((sum, part) => sum + part.time_ms, 0);
      return { value, itemStyle: shape(parts[0]), title: `${bar.label}: ${parts[0].name}`, facts: parts[0].facts };
    };
    const small = width < 430;
    const room = (width - 48) / spec.bars.length; // for one bar
    const crowded = spec.bars.some((bar) => bar.label.length * (small ? 6.4 : 7) > room);
    const series = keys.map((key) => ({
      name: key, type: "bar", stack: "all", barWidth: "62%", barMaxWidth: 120, data: spec.bars.map((bar) => datum(bar, key)),
      emphasis: { itemStyle: { borderColor: look.ink, borderWidth: 1.4 } },
    }));
    series.push({
      name: "above", type: "bar", stack: "all", silent: true, data: spec.bars.map((bar) => ({
        value: 0,
        label: {
          show: true, position: "top", distance: 2, align: "center", backgroundColor: look.paper, padding: [1, 2],
          formatter: [
            bar.head && `{${bar.alarm ? "alarm" : "head"}|${bar.head}}`, bar.interval && `{small|${bar.interval}}`,
            bar.time && `{small|${bar.time}}`, ...wrapped(bar.note, Math.max(8, Math.floor(room / 6))).map((line) => `{note|${line}}`),
          ].filter(Boolean).join("\n"),
          rich: {
            head: { fontSize: small ? 13 : 15, fontWeight: 650, color: look.ink, lineHeight: small ? 17 : 20 },
            alarm: { fontSize: small ? 11 : 13, fontWeight: 700, color: look.alarm, lineHeight: 18 },
            small: { fontSize: small ? 10.5 : 11.5, color: look.soft, lineHeight: 14 },
            note: { fontSize: small ? 10 : 11, color: look.soft, lineHeight: 14 },
          },
        },
      })),
    });
    return {
      ...base(look, plot),
      grid: { left: 44, right: 4, top: 28, bottom: crowded ? 64 : 28 },
      xAxis: { type: "category", data: spec.bars.map((bar) => bar.label), ...axis(look), axisLabel: { color: look.ink, fontSize: small ? 11 : 12, interval: 0, rotate: crowded ? 35 : 0 } },
      yAxis: { type: "value", ...rounded((spec.top || 1) * 1.17), name: spec.unit, nameLocation: "end", nameGap: 13, ...axis(look), nameTextStyle: { color: look.soft, fontSize: 11.5, align: "left", padding: [0, 0, 0, -40] } },
      series,
    };
  }

  /* Text in lines of about so many characters. */
  function wrapped(text, count) {
    const lines = [];
    for (const word of text.split(" ").filter(Boolean)) {
      const last = lines.length - 1;
      if (last >= 0 && lines[last].length + word.length < count) lines[last] += ` ${word}`;
      else lines.push(word);
    }
    return lines;
  }

  /* Round lines up to above the highest bar and what stands on it. */
  function rounded(value) {
    const unit = 10 ** Math.floor(Math.log10(value));
    const interval = [0.1, 0.2, 0.25, 0.5, 1, 2].map((step) => step * unit).find((step) => value / step <= 5.2);
    return { interval, max: Math.ceil(value / interval) * interval };
  }

  /* Every part of a waterfall as the way from one speedup to the next; the step at the end. */
  function steps(spec) {
    const facts = (baseline, recipe, name, speedup) => [
      [spec.baseline, `${baseline.toFixed(2)} ms`], [spec.recipe, `${recipe.toFixed(2)} ms`], [name, `${speedup.toFixed(3)}x`],
    ];
    let [before, baseline, recipe] = [1, 0, 0];
    const rows = spec.falls.map((fall, index) => {
      const row = { name: fall.part, from: before, to: fall.speedup, kind: index === 0 ? "start" : fall.speedup <= before ? "down" : "up" };
      before = fall.speedup;
      baseline += fall.baseline_ms;
      recipe += fall.recipe_ms;
      return { ...row, facts: facts(fall.baseline_ms, fall.recipe_ms, "speedup so far", fall.speedup) };
    });
    return [...rows, { name: "the step", from: 1, to: before, kind: "end", facts: facts(baseline, recipe, "speedup", before) }];
  }

  /* From the speedup of the GEMMs to that of the step, part by part. */
  function waterfall(spec, look, width, plot) {
    const rows = steps(spec);
    const colours = { start: colour("part-gemms"), down: colour("mark-loss"), up: colour("mark-gain"), end: colour("mark-total") };
    const across = (row, index, api) => {
      const [from, to] = [api.coord([row.from, index]), api.coord([row.to, index])];
      const height = api.size([0, 1])[1] * 0.62;
      const left = Math.min(from[0], to[0]);
      return { x: left, y: from[1] - height / 2, width: Math.max(Math.abs(from[0] - to[0]), 1.5), height };
    };
    return {
      ...base(look, plot),
      grid: { left: 138, right: 62, top: 6, bottom: 24 },
      xAxis: speedups(spec, look, width - 200),
      yAxis: { type: "category", inverse: true, data: rows.map((row) => row.name), ...axis(look), axisLabel: { color: look.ink, fontSize: 11.5, interval: 0 } },
      series: [{
        type: "custom",
        data: rows.map((row, index) => ({ value: [row.to, index, row.from], title: row.name, facts: row.facts })),
        encode: { x: [0, 2], y: 1 },
        renderItem: (_, api) => {
          const index = api.value(1);
          const row = rows[index];
          const box = across(row, index, api);
          const children = [{ type: "rect", shape: box, style: { fill: colours[row.kind] }, emphasis: { style: { stroke: look.ink, lineWidth: 1.4 } } }];
          const strong = row.kind === "start" || row.kind === "end";
          children.push({
            type: "text", silent: true, x: Math.max(api.coord([row.to, index])[0], box.x + box.width) + 5, y: box.y + box.height / 2,
            style: { text: `${row.to.toFixed(strong ? 3 : 2)}x`, fill: strong ? look.ink : look.soft, font: `${strong ? 650 : 400} 11.5px ${look.font}`, verticalAlign: "middle" },
          });
          if (index + 1 < rows.length) {
            const x = api.coord([row.to, index])[0];
            children.push({ type: "line", silent: true, shape: { x1: x, y1: box.y + box.height, x2: x, y2: api.coord([row.to, index + 1])[1] }, style: { stroke: look.soft, lineWidth: 0.7 }, z2: -1 });
          }
          return { type: "group", children };
        },
      }, one(look)],
    };
  }

  /* An axis of speedups, with as many lines as have room. */
  function speedups(spec, look, room) {
    return { type: "value", min: spec.low, max: spec.high, splitNumber: Math.max(2, Math.floor(room / 62)), ...axis(look),
      axisLabel: { color: look.soft, fontSize: 11, showMinLabel: false, showMaxLabel: false, formatter: (value) => `${Math.round(value * 100) / 100}x` } };
  }

  /* The line where nothing is gained and nothing lost. */
  const one = (look, side = "xAxis") => ({
    type: "line", data: [], silent: true,
    markLine: { silent: true, symbol: "none", label: { show: false }, lineStyle: { color: look.soft, type: [4, 3], width: 1 }, data: [{ [side]: 1 }] },
  });

  /* An estimate with its interval, lying or standing. */
  function whisker(low, high, middle, stroke, upright) {
    const ends = upright ? { x1: middle[0], x2: middle[0], y1: low[1], y2: high[1] } : { x1: low[0], x2: high[0], y1: middle[1], y2: middle[1] };
    return { type: "line", shape: ends, style: { stroke, lineWidth: 2 } };
  }

  const SYMBOLS = { o: "circle", s: "rect", "^": "triangle", D: "diamond", v: "emptyCircle", P: "emptyRect", X: "emptyTriangle", p: "emptyDiamond", "*": "pin" };

  /* Speedups against a size, each with its interval. */
  function curve(spec, look, width, plot) {
    const crowded = spec.places.length * 46 > width || spec.places.some((place) => place.length > 9);
    const names = Object.keys(spec.series);
    const made = names.flatMap((name, index) => {
      const shift = (index - (names.length - 1) / 2) * 5; // or intervals would hide each other
      const own = colour(spec.colors[name]);
      const data = spec.series[name].map(({ at, value, facts }) => ({ value: [spec.places.indexOf(at), value.value, value.low, value.high], title: `${name}, ${at}`, facts }));
      return [
        { name, type: "line", data, symbol: SYMBOLS[spec.shapes[spec.colors[name]].marker], symbolSize: 8, symbolOffset: [shift, 0], color: own, lineStyle: { width: 1.4 }, emphasis: { scale: 1.5 } },
        {
          type: "custom", data: data.filter((point) => point.value[2] !== null), silent: true, z: 3,
          renderItem: (_, api) => {
            const at = (value) => { const [x, y] = api.coord([api.value(0), value]); return [x + shift, y]; };
            return whisker(at(api.value(2)), at(api.value(3)), at(api.value(1)), own, true);
          },
        },
      ];
    });
    return {
      ...base(look, plot),
      legend: { data: names, top: 0, left: spec.unit === "x" ? 40 : 70, itemWidth: 18, textStyle: { color: look.ink, fontSize: 12 }, selectedMode: false },
      grid: { left: 44, right: 10, top: 34, bottom: crowded ? 84 : 48 },
      xAxis: { type: "category", data: spec.places, name: spec.axis, nameLocation: "middle", nameGap: crowded ? 66 : 28, ...axis(look), axisLabel: { color: look.ink, fontSize: 11, interval: 0, rotate: crowded ? 38 : 0 } },
      yAxis: spec.unit === "x" ? speedups(spec, look, 300) : { type: "value", min: spec.low, max: spec.high, name: spec.unit, nameGap: 12, ...axis(look), nameTextStyle: { color: look.soft, fontSize: 11.5, align: "left", padding: [0, 0, 0, -42] }, axisLabel: { color: look.soft, fontSize: 11, showMaxLabel: false } },
      series: spec.unit === "x" ? [...made, one(look, "yAxis")] : made,
    };
  }

  /* All runs' speedups below one another: dots with their intervals. */
  function gains(spec, look, width, plot) {
    const names = spec.rows.map((row) => `${row.recipe}\n{what|${row.what}}`);
    const made = spec.runs.map((run, place) => {
      const own = colour(spec.colors[run]);
      const shift = (place - (spec.runs.length - 1) / 2) * Math.min(11, 30 / spec.runs.length);
      const data = spec.rows.flatMap((row, index) => row.dots.filter((dot) => dot.run === run).map((dot) => ({
        value: [dot.value, index, dot.low, dot.high], title: `${row.recipe}, ${row.what}`, facts: dot.facts,
      })));
      return {
        name: run, type: "custom", data, color: own, encode: { x: [0, 2, 3], y: 1 },
        renderItem: (_, api) => {
          const at = (value) => { const [x, y] = api.coord([value, api.value(1)]); return [x, y + shift]; };
          const middle = at(api.value(0));
          const children = [{ type: "circle", shape: { cx: middle[0], cy: middle[1], r: 4.2 }, style: { fill: own }, emphasis: { style: { stroke: look.ink, lineWidth: 1.4 } } }];
          if (Number.isFinite(api.value(2))) children.unshift(whisker(at(api.value(2)), at(api.value(3)), middle, own, false));
          children.push({ type: "text", silent: true, x: at(Number.isFinite(api.value(3)) ? api.value(3) : api.value(0))[0] + 6, y: middle[1], style: { text: run, fill: look.soft, font: `10.5px ${look.font}`, verticalAlign: "middle" } });
          return { type: "group", children };
        },
      };
    });
    return {
      ...base(look, plot),
      grid: { left: width < 430 ? 126 : 170, right: 26, top: 6, bottom: 24 },
      xAxis: speedups(spec, look, width - 196),
      yAxis: { type: "category", inverse: true, data: names, ...axis(look), axisLabel: { color: look.ink, fontSize: 12, interval: 0, lineHeight: 14, rich: { what: { fontSize: 10.5, color: look.soft, lineHeight: 13 } } }, splitLine: { show: true, lineStyle: { color: look.line } } },
      series: [...made, one(look)],
    };
  }

  /* The fields of a heat map with their places; what has no speedup is on the uncertain side of the line. */
  const fields = (spec) => spec.cells.flatMap((row, y) => row.map((cell, x) => ({ ...cell, at: [x, y], certain: cell.certain && cell.value !== null })));

  /* The best precision over a plane of two sizes: its speedup as color, its name in the field. */
  function heat(spec, look, width, plot) {
    const crowded = spec.columns.length * 74 > width;
    const all = fields(spec);
    const data = all.map((cell) => ({
      value: [...cell.at, cell.value === null ? "-" : cell.value], title: `${spec.row_name} ${spec.rows[cell.at[1]]}, ${spec.column_name} ${spec.columns[cell.at[0]]}`,
      facts: cell.text ? [["best", cell.text]] : [], name: cell.label,
    }));
    const names = (list, name, gap) => ({ type: "category", data: list, name, nameLocation: "middle", nameGap: gap, ...axis(look), axisLabel: { color: look.ink, fontSize: 11 } });
    return {
      ...base(look, plot),
      grid: { left: 70, right: 14, top: 14, bottom: 92 },
      xAxis: names(spec.columns, spec.column_name, 26),
      yAxis: names(spec.rows, spec.row_name, 54),
      visualMap: { min: 1, max: spec.high, calculable: false, orient: "horizontal", left: "center", bottom: 4, precision: 2, text: [`${spec.high.toFixed(2)}x`, "1.00x"], textStyle: { color: look.soft }, inRange: { color: spec.stops } },
      series: [
        { type: "heatmap", data, label: { show: !crowded, fontSize: 10.5, lineHeight: 13, formatter: (at) => at.data.name }, emphasis: { itemStyle: { borderColor: look.ink, borderWidth: 1.4 } } },
        { type: "custom", silent: true, z: 5, data: all.map((cell) => cell.at), renderItem: (at, api) => ({ type: "group", children: over(all, look, at.dataIndex, api, crowded) }) },
      ],
    };
  }

  /* On top of a field: its text where it has no speedup, and the break-even line to neighbors on the other side of it. */
  function over(all, look, index, api, crowded) {
    const cell = all[index];
    const [x, y] = api.coord(cell.at);
    const [width, height] = api.size([1, 1]);
    const children = [];
    if (cell.value === null && cell.text && !crowded) {
      children.push({ type: "text", x, y, style: { text: wrapped(cell.text, Math.max(6, Math.floor(width / 6))).join("\n"), fill: look.soft, font: `10.5px ${look.font}`, align: "center", verticalAlign: "middle" } });
    }
    const side = (right, up, shape) => {
      const other = all.find((one) => one.at[0] === cell.at[0] + right && one.at[1] === cell.at[1] + up);
      if (other && other.certain !== cell.certain) children.push({ type: "line", shape, style: { stroke: look.down, lineWidth: 2.5 } });
    };
    side(1, 0, { x1: x + width / 2, x2: x + width / 2, y1: y - height / 2, y2: y + height / 2 });
    side(0, 1, { x1: x - width / 2, x2: x + width / 2, y1: y - height / 2, y2: y - height / 2 });
    return children;
  }

  const KINDS = { bars, waterfall, curve, gains, heat };
  const lines = (spec) => Math.max(1, ...spec.cells.flat().map((cell) => cell.label.split("\n").length));
  const height = (spec) => ({ heat: () => Math.max(380, 110 + spec.rows.length * (12 + 13 * lines(spec))), waterfall: () => 30 + 27 * (spec.falls.length + 1), gains: () => 34 + spec.rows.length * Math.max(38, 13 * spec.runs.length + 14) }[spec.type] || (() => 380))();

  // --- drawing, again when the window or the theme changes ----------------------------------------------------------------

  const paper = matchMedia("print");
  function draw(place) {
    const plot = plots[place];
    const spec = specs[Number(plot.dataset.chart)];
    drawn[place] = drawn[place] || echarts.init(plot, null, { renderer: "svg", width: 100, height: 100 });
    if (!paper.matches) { // on paper a drawing is scaled as it is, in the colours of paper
      plot.style.height = `${height(spec)}px`;
      drawn[place].resize({ width: plot.clientWidth, height: height(spec) });
    }
    drawn[place].setOption(KINDS[spec.type](spec, looks(), drawn[place].getWidth(), plot), true);
    const svg = plot.querySelector("svg");
    svg.setAttribute("viewBox", `0 0 ${drawn[place].getWidth()} ${drawn[place].getHeight()}`);
  }
  /* Which color is what, and what the shades mean: a list above the bars. */
  function legend(plot, spec) {
    const list = document.createElement("ul");
    list.className = "legend";
    const add = (look, name) => {
      const item = list.appendChild(document.createElement("li"));
      const box = item.appendChild(Object.assign(document.createElement("i"), { className: look }));
      if (look.includes("-")) box.style.background = `var(--${look})`;
      item.append(name);
    };
    if (spec.type === "heat") {
      if (new Set(fields(spec).map((cell) => cell.certain)).size > 1) add("edge", "break-even line: the speedup is certain beyond it");
      for (const [mark, meaning] of spec.legend) add("none", `${mark}: ${meaning}`);
      plot.before(list);
      return;
    }
    for (const [name, key] of spec.legend) add(key === "part-quantization" ? "hatched" : key, name);
    if (spec.bars.some((bar) => bar.segments.some((part) => part.shade === "light"))) { add("dark", "fprop + dgrad"); add("light", "wgrad (lighter)"); }
    plot.before(list);
  }
  plots.forEach((plot) => { const spec = specs[Number(plot.dataset.chart)]; if (spec.type === "bars" || spec.type === "heat") legend(plot, spec); });
  const drawAll = () => plots.forEach((_, place) => draw(place));
  drawAll();
  let waiting = 0;
  const later = () => { clearTimeout(waiting); if (!paper.matches) waiting = setTimeout(drawAll, 80); };
  addEventListener("resize", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  paper.addEventListener("change", drawAll);

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

  // --- copying: the clipboard's own way, or the old one where a page from a file may not use it -----------------------------

  async function copy(button) {
    const code = button.closest(".paste").querySelector("code");
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

  document.documentElement.dataset.drawn = String(drawn.length);
})();
