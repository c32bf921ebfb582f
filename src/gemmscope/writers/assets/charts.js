"use strict";
/* The kinds of charts, as options for ECharts. Colors are those of the palette, read from the style sheet; text from a run file is
   text, never markup. */
const CHARTS = (() => {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function readTheme() {
    const names = ["paper", "ink", "soft", "line", "faint", "alarm"];
    return { ...Object.fromEntries(names.map((name) => [name, colour(name)])), font: colour("sans") };
  }

  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const mixed = (first, second, share) => {
    const [a, b] = [parts(first), parts(second)];
    return `#${a.map((value, index) => Math.round(value * share + b[index] * (1 - share)).toString(16).padStart(2, "0")).join("")}`;
  };
  const isDark = (hex) => { const [r, g, b] = parts(hex); return 0.299 * r + 0.587 * g + 0.114 * b < 140; };
  const onTop = (hex) => (isDark(hex) ? "#ffffff" : "#1b1f24");
  const fixed = (value, digits) => value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const plain = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 4 });
  const ms = (value) => `${fixed(value, value >= 100 ? 0 : value >= 0.1 ? 2 : 3)} ms`;

  // --- faces of bars: a color, and a hatch that tells it from its neighbors in grey print ----------------------------------

  const LINES = { "/": -Math.PI / 4, "\\": Math.PI / 4, "-": 0, "|": Math.PI / 2 };
  function decal(hatch, color) {
    if (hatch in LINES) return { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [1, 4], rotation: LINES[hatch], color, symbolSize: 1 };
    if (hatch !== ".") return null;
    const step = matchMedia("print").matches ? 12 : 5; // every dot is drawn by itself on paper: megabytes of them
    return { symbol: "circle", dashArrayX: [[step, step], [0, step, step, 0]], dashArrayY: [step, 0], color, symbolSize: 1.8 / step };
  }
  /* Fill, hatch and outline. wgrad is lighter, with dots of its own color. */
  function face(theme, own, hatch, shade) {
    if (shade === "hatched") return { fill: theme.paper, hatch: "/", over: theme.soft, edge: theme.soft };
    if (shade === "light") return { fill: mixed(own, theme.paper, 0.45), hatch: ".", over: own, edge: theme.paper };
    return { fill: own, hatch, over: onTop(own), edge: theme.paper };
  }
  function itemStyle(theme, own, hatch, shade) {
    const style = face(theme, own, hatch, shade);
    return { color: style.fill, decal: decal(style.hatch, mixed(style.over, style.fill, 0.75)), borderColor: style.edge, borderWidth: 0.7 };
  }

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

  function base(theme, plot) {
    return {
      animation: false,
      textStyle: { fontFamily: theme.font, color: theme.ink },
      tooltip: {
        trigger: "item", position: (at, _, box) => beside(plot, at, box), className: "tip", backgroundColor: theme.paper, borderColor: theme.soft, borderWidth: 1,
        padding: [6, 9], transitionDuration: 0, textStyle: { color: theme.ink, fontFamily: theme.font, fontSize: 12 },
        formatter: (at) => (at.data && at.data.facts ? tip(at.data.title, at.data.facts) : ""),
      },
    };
  }

  const axis = (theme) => ({
    axisLine: { lineStyle: { color: theme.soft } }, axisTick: { show: false }, axisLabel: { color: theme.soft, fontSize: 11.5, formatter: plain },
    splitLine: { lineStyle: { color: theme.line } }, nameTextStyle: { color: theme.soft, fontSize: 11.5 },
  });
  const names = (theme, list, more = {}) => ({ type: "category", data: list, ...axis(theme), axisLabel: { color: theme.ink, fontSize: 12, interval: 0, ...more } });

  /* Text in lines of about so many characters. */
  function wrapped(text, count) {
    const lines = [];
    const pieces = text.split(" ").flatMap((word) => word.match(new RegExp(`.{1,${count}}`, "g")) || []);
    for (const word of pieces) {
      const last = lines.length - 1;
      if (last >= 0 && lines[last].length + word.length < count) lines[last] += ` ${word}`;
      else lines.push(word);
    }
    return lines;
  }

  /* Round lines up to above the highest value. */
  function rounded(value, lines = 5.2) {
    const unit = 10 ** Math.floor(Math.log10(value));
    const interval = [0.1, 0.2, 0.25, 0.5, 1, 2, 5].map((step) => step * unit).find((step) => value / step <= lines);
    return { interval, max: Math.ceil(value / interval) * interval };
  }

  /* An axis of speedups, with as many lines as have room. */
  function speedups(spec, theme, room) {
    return { type: "value", min: spec.low, max: spec.high, splitNumber: Math.max(2, Math.floor(room / 62)), ...axis(theme),
      axisLabel: { color: theme.soft, fontSize: 11, showMinLabel: false, showMaxLabel: false, formatter: (value) => `${Math.round(value * 100) / 100}x` } };
  }

  /* A dashed line: nothing is gained and nothing lost, or the baseline. */
  const dashed = (theme, side = "xAxis", at = 1) => ({
    type: "line", data: [], silent: true,
    markLine: { silent: true, precision: 9, symbol: "none", label: { show: false }, lineStyle: { color: theme.soft, type: [4, 3], width: 1 }, data: [{ [side]: at }] },
  });

  /* An interval, lying or standing; on a bar of any color with the color of the paper below it. */
  function whisker(low, high, middle, stroke, upright, under) {
    const ends = upright ? { x1: middle[0], x2: middle[0], y1: low[1], y2: high[1] } : { x1: low[0], x2: high[0], y1: middle[1], y2: middle[1] };
    const line = (color, lineWidth) => ({ type: "line", shape: ends, style: { stroke: color, lineWidth } });
    return under ? { type: "group", children: [line(under, 4), line(stroke, 1.6)] } : line(stroke, 1.6);
  }

  // --- stacked bars -------------------------------------------------------------------------------------------------------

  const total = (bar) => bar.segments.reduce((sum, part) => sum + part.time_ms, 0);
  const few = (spec) => spec.bars.filter((bar) => bar.segments.length).length <= 2;

  /* The segments as series; several small ops may share one name: they are one segment with the sum, and the facts of the first. */
  function stacked(spec, theme, more) {
    const keys = [...new Set(spec.bars.flatMap((bar) => bar.segments.map((part) => `${part.name}/${part.shade}`)))];
    const datum = (bar, key) => {
      const own = bar.segments.filter((part) => `${part.name}/${part.shade}` === key);
      if (!own.length) return "-";
      const style = itemStyle(theme, colour(own[0].color), (spec.shapes[own[0].color] || {}).hatch, own[0].shade);
      return { value: own.reduce((sum, part) => sum + part.time_ms, 0), itemStyle: style, title: `${bar.label}: ${own[0].name}`, facts: own[0].facts };
    };
    return keys.map((key) => ({
      name: key, type: "bar", stack: "all", data: spec.bars.map((bar) => datum(bar, key)), ...more,
      emphasis: { itemStyle: { borderColor: theme.ink, borderWidth: 1.4 } },
    }));
  }

  /* One stacked bar per recipe; its speedup, interval and time above it. */
  function bars(spec, theme, width, plot) {
    if (few(spec)) return strips(spec, theme, width, plot);
    const small = width < 430;
    const room = (width - 48) / spec.bars.length; // for one bar
    const crowded = spec.bars.some((bar) => bar.label.length * (small ? 6.6 : 7.2) > room);
    const highest = Math.max(...spec.bars.map(total)) || 1;
    const shared = spec.top <= 5 * highest ? spec.top : highest; // an axis of its own where the common one would flatten the bars
    const series = stacked(spec, theme, { barWidth: "62%", barMaxWidth: 120 });
    series.push({
      name: "above", type: "bar", stack: "all", silent: true, data: spec.bars.map((bar) => ({
        value: 0,
        label: {
          show: true, position: "top", distance: 2, align: "center", backgroundColor: theme.paper, padding: [1, 2],
          formatter: [
            bar.head && `{${bar.alarm ? "alarm" : "head"}|${bar.head}}`, bar.interval && room > 58 && `{small|${bar.interval}}`,
            bar.time && `{small|${bar.time}}`, ...wrapped(bar.note, Math.max(8, Math.floor(room / 6))).map((line) => `{note|${line}}`),
          ].filter(Boolean).join("\n"),
          rich: {
            head: { fontSize: small ? 13 : 15, fontWeight: 650, color: theme.ink, lineHeight: small ? 17 : 20 },
            alarm: { fontSize: small ? 11 : 13, fontWeight: 700, color: theme.alarm, lineHeight: 18 },
            small: { fontSize: small ? 10 : 11.5, color: theme.soft, lineHeight: 14 },
            note: { fontSize: small ? 10 : 11, color: theme.soft, lineHeight: 14 },
          },
        },
      })),
    });
    const left = 14 + 7 * plain(rounded(shared * 1.17).max).length;
    return {
      ...base(theme, plot),
      grid: { left, right: 4, top: 28, bottom: crowded ? 64 : 26 },
      xAxis: names(theme, spec.bars.map((bar) => bar.label), { fontSize: small ? 11 : 12, rotate: crowded ? 35 : 0 }),
      yAxis: { type: "value", ...rounded(shared * 1.17), name: spec.unit, nameLocation: "end", nameGap: 13, ...axis(theme), nameTextStyle: { color: theme.soft, fontSize: 11.5, align: "left", padding: [0, 0, 0, 4 - left] } },
      series,
    };
  }

  /* One or two bars lie down; the legend below them has the numbers. */
  function strips(spec, theme, width, plot) {
    const left = 12 + 6.6 * Math.max(...spec.bars.map((bar) => Math.max(Math.min(bar.label.length, 16), bar.time.length + bar.head.length + 3)));
    const labels = spec.bars.map((bar) => `${wrapped(bar.label, 16).join("\n")}\n{soft|${[bar.time, bar.head].filter(Boolean).join(" · ")}}`);
    return {
      ...base(theme, plot),
      grid: { left, right: 22, top: 4, bottom: 24 },
      yAxis: { ...names(theme, labels, { align: "left", margin: left - 2, lineHeight: 15, rich: { soft: { color: theme.soft, fontSize: 11.5, lineHeight: 15 } } }), inverse: true, axisLine: { show: false } },
      xAxis: { type: "value", ...rounded(Math.max(...spec.bars.map(total)) || 1, width < 500 ? 4 : 8), max: (range) => range.max, ...axis(theme), axisLabel: { color: theme.soft, fontSize: 11, formatter: (value) => `${plain(value)} ms`, hideOverlap: true, showMaxLabel: false } },
      series: stacked(spec, theme, { barWidth: 38 }),
    };
  }

  // --- one baseline for all: a bar per GPU or run and recipe ---------------------------------------------------------------

  const rateRows = (spec) => spec.groups.flatMap((group) => [{ heading: group.name }, ...group.bars.map((bar) => ({ ...bar, group: group.name }))]);

  function rates(spec, theme, width, plot) {
    const rows = rateRows(spec);
    const highest = Math.max(spec.at, ...rows.flatMap((row) => (row.heading === undefined ? [row.value, row.high || 0] : [])));
    const data = rows.map((row, index) => (row.heading === undefined
      ? { value: [row.value, index, row.low, row.high], title: `${row.recipe}, ${row.group}`, facts: row.facts } : { value: [0, index, null, null] }));
    return {
      ...base(theme, plot),
      grid: { left: 106, right: width < 430 ? 92 : 112, top: 2, bottom: 42 },
      xAxis: { type: "value", min: 0, ...rounded(highest, width < 500 ? 3 : 5.2), max: highest, name: spec.unit, nameLocation: "middle", nameGap: 26, ...axis(theme), axisLabel: { color: theme.soft, fontSize: 11, formatter: plain, hideOverlap: true, showMaxLabel: false } },
      yAxis: { ...names(theme, rows.map((row) => row.recipe || "")), inverse: true, axisLine: { show: false } },
      series: [{
        type: "custom", data, encode: { x: [0, 2, 3], y: 1 }, clip: false, z: 6,
        renderItem: (_, api) => {
          const row = rows[api.value(1)];
          const at = (value) => api.coord([value, api.value(1)]);
          const [zero, end] = [at(0), at(api.value(0))];
          const label = (x, text, style) => ({ type: "text", silent: true, x, y: zero[1], style: { text, verticalAlign: "middle", ...style } });
          if (row.heading !== undefined) return { type: "group", children: [label(2, row.heading, { fill: theme.ink, font: `650 12px ${theme.font}`, width: width - 4, overflow: "truncate" })] };
          const thick = Math.min(15, api.size([0, 1])[1] * 0.7);
          const children = [{ type: "rect", shape: { x: zero[0], y: zero[1] - thick / 2, width: Math.max(1, end[0] - zero[0]), height: thick }, style: { fill: colour(row.color) }, emphasis: { style: { stroke: theme.ink, lineWidth: 1.4 } } }];
          const known = Number.isFinite(api.value(3)) && row.high > row.low;
          if (known) children.push(whisker(at(api.value(2)), at(api.value(3)), end, theme.ink, false, theme.paper));
          children.push(label(Math.max(end[0], known ? at(api.value(3))[0] : 0) + 6, row.text, { fill: theme.ink, font: `11.5px ${theme.font}`, backgroundColor: theme.paper, padding: [1, 2] }));
          return { type: "group", children };
        },
      }, dashed(theme, "xAxis", spec.at)],
    };
  }

  // --- waterfalls ---------------------------------------------------------------------------------------------------------

  /* Every part of a waterfall as the way from one speedup to the next; the step at the end. */
  function steps(spec) {
    const facts = (baseline, recipe, name, speedup) => [[spec.baseline, ms(baseline)], [spec.recipe, ms(recipe)], [name, `${speedup.toFixed(3)}x`]];
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
  function waterfall(spec, theme, width, plot) {
    const rows = steps(spec);
    const colours = { start: colour("part-gemms"), down: colour("mark-loss"), up: colour("mark-gain"), end: colour("mark-total") };
    const across = (row, index, api) => {
      const [from, to] = [api.coord([row.from, index]), api.coord([row.to, index])];
      const height = api.size([0, 1])[1] * 0.62;
      const left = Math.min(from[0], to[0]);
      return { x: left, y: from[1] - height / 2, width: Math.max(Math.abs(from[0] - to[0]), 1.5), height };
    };
    return {
      ...base(theme, plot),
      grid: { left: 142, right: 62, top: 6, bottom: 24 },
      xAxis: speedups(spec, theme, width - 200),
      yAxis: { ...names(theme, rows.map((row) => row.name), { fontSize: 11.5 }), inverse: true },
      series: [{
        type: "custom",
        data: rows.map((row, index) => ({ value: [row.to, index, row.from], title: row.name, facts: row.facts })),
        encode: { x: [0, 2], y: 1 },
        renderItem: (_, api) => {
          const index = api.value(1);
          const row = rows[index];
          const box = across(row, index, api);
          const children = [{ type: "rect", shape: box, style: { fill: colours[row.kind] }, emphasis: { style: { stroke: theme.ink, lineWidth: 1.4 } } }];
          const strong = row.kind === "start" || row.kind === "end";
          children.push({
            type: "text", silent: true, x: Math.max(api.coord([row.to, index])[0], box.x + box.width) + 5, y: box.y + box.height / 2,
            style: { text: `${row.to.toFixed(strong ? 3 : 2)}x`, fill: strong ? theme.ink : theme.soft, font: `${strong ? 650 : 400} 11.5px ${theme.font}`, verticalAlign: "middle" },
          });
          if (index + 1 < rows.length) {
            const x = api.coord([row.to, index])[0];
            children.push({ type: "line", silent: true, shape: { x1: x, y1: box.y + box.height, x2: x, y2: api.coord([row.to, index + 1])[1] }, style: { stroke: theme.soft, lineWidth: 0.7 }, z2: -1 });
          }
          return { type: "group", children };
        },
      }, dashed(theme)],
    };
  }

  // --- values against a size, and speedups of several runs -----------------------------------------------------------------

  const SYMBOLS = {
    o: "circle", s: "rect", "^": "triangle", D: "diamond", v: "path://M0,0L10,0L5,9Z", P: "path://M3,0H7V3H10V7H7V10H3V7H0V3H3Z",
    X: "path://M2,0L5,3L8,0L10,2L7,5L10,8L8,10L5,7L2,10L0,8L3,5L0,2Z", p: "path://M5,0L10,3.8L8.1,10H1.9L0,3.8Z",
    "*": "path://M5,0L6.2,3.6H10L7,5.9L8.1,9.6L5,7.4L1.9,9.6L3,5.9L0,3.6H3.8Z",
  };
  const DASHES = { solid: "solid", dashed: "dashed", dotted: "dotted", dashdot: [6, 3, 1, 3] };

  /* Each value with its interval. */
  function curve(spec, theme, width, plot) {
    const crowded = spec.places.length * 46 > width || spec.places.some((place) => place.length > 9);
    const known = Object.keys(spec.series);
    const linear = spec.limit !== null;
    const series = known.flatMap((name, index) => {
      const shift = (index - (known.length - 1) / 2) * 5; // or intervals would hide each other
      const own = colour(spec.colors[name]);
      const shape = spec.shapes[spec.colors[name]] || {};
      const data = spec.series[name].map(({ at, value, facts, mark }) => ({ value: [linear ? Number(at) : spec.places.indexOf(at), value.value, value.low, value.high], title: `${name}, ${at}`, facts, mark }));
      return [
        { name, type: "line", data, symbol: SYMBOLS[shape.marker] || "circle", symbolSize: 8, symbolOffset: [shift, 0], color: own, lineStyle: { width: 1.6, type: DASHES[shape.line] || "solid" }, emphasis: { scale: 1.5 } },
        {
          type: "custom", data: data.filter((point) => point.value[2] !== null), silent: true, z: 3,
          renderItem: (_, api) => {
            const at = (value) => { const [x, y] = api.coord([api.value(0), value]); return [x + shift, y]; };
            return whisker(at(api.value(2)), at(api.value(3)), at(api.value(1)), own, true);
          },
        },
        { type: "scatter", data: data.filter((point) => point.mark).map((point) => point.value.slice(0, 2)), silent: true, symbol: SYMBOLS.X, symbolSize: 11, symbolOffset: [shift, 0], itemStyle: { color: theme.ink, borderColor: theme.paper, borderWidth: 1 }, z: 6 },
      ];
    });
    const speed = spec.unit === "x";
    return {
      ...base(theme, plot),
      legend: { data: known, top: 0, left: 0, itemWidth: 26, itemGap: 14, textStyle: { color: theme.ink, fontSize: 12 }, selectedMode: false },
      grid: { left: 48, right: 12, top: speed ? 34 : 60, bottom: crowded ? 84 : 48, ...(width < 500 ? { top: 74 } : {}) },
      xAxis: { ...(linear ? { type: "value", min: 0, max: Math.ceil(spec.limit * 1.03), ...axis(theme), axisLabel: { ...axis(theme).axisLabel, showMaxLabel: false } } : names(theme, spec.places, { fontSize: 11, rotate: crowded ? 38 : 0 })), name: spec.axis, nameLocation: "middle", nameGap: crowded && !linear ? 66 : 28 },
      yAxis: speed ? speedups(spec, theme, 300) : { type: "value", min: spec.low, ...rounded(spec.high), name: spec.unit, nameGap: 12, ...axis(theme), nameTextStyle: { color: theme.soft, fontSize: 11.5, align: "left", padding: [0, 0, 0, -42] } },
      series: [...series, ...(speed ? [dashed(theme, "yAxis")] : []), ...(linear ? [dashed(theme, "xAxis", spec.limit)] : [])],
    };
  }

  /* All runs' speedups below one another: dots with their intervals. */
  function gains(spec, theme, width, plot) {
    const labels = spec.rows.map((row) => `${row.recipe}\n{what|${row.what}}`);
    const series = spec.runs.map((run, place) => {
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
          const children = [{ type: "circle", shape: { cx: middle[0], cy: middle[1], r: 4.2 }, style: { fill: own }, emphasis: { style: { stroke: theme.ink, lineWidth: 1.4 } } }];
          if (Number.isFinite(api.value(2))) children.unshift(whisker(at(api.value(2)), at(api.value(3)), middle, own, false));
          children.push({ type: "text", silent: true, x: at(Number.isFinite(api.value(3)) ? api.value(3) : api.value(0))[0] + 6, y: middle[1], style: { text: run, fill: theme.soft, font: `10.5px ${theme.font}`, verticalAlign: "middle" } });
          return { type: "group", children };
        },
      };
    });
    return {
      ...base(theme, plot),
      grid: { left: width < 430 ? 126 : 170, right: 26, top: 6, bottom: 24 },
      xAxis: speedups(spec, theme, width - 196),
      yAxis: { ...names(theme, labels, { lineHeight: 14, rich: { what: { fontSize: 10.5, color: theme.soft, lineHeight: 13 } } }), inverse: true, splitLine: { show: true, lineStyle: { color: theme.line } } },
      series: [...series, dashed(theme)],
    };
  }

  /* Speed against error: a dot for each recipe, the mixes between them, the bound, and the one to use. */
  function scatter(spec, theme, width, plot) {
    const share = (value) => `${plain(Math.round(value * 1e6) / 1e4)}%`;
    const point = (dot) => ({ value: [dot.speedup.value, dot.error, dot.speedup.low, dot.speedup.high], title: dot.name, facts: dot.facts });
    const series = spec.dots.flatMap((dot) => {
      const own = colour(spec.colors[dot.name]);
      const shape = spec.shapes[spec.colors[dot.name]] || {};
      const data = [point(dot)];
      return [
        { name: dot.name, type: "scatter", data, symbol: SYMBOLS[shape.marker] || "circle", symbolSize: 12, color: own, z: 5 },
        {
          type: "custom", silent: true, z: 4, data: dot.speedup.low === null ? [] : data,
          renderItem: (_, api) => { const at = (x) => api.coord([x, api.value(1)]); return whisker(at(api.value(2)), at(api.value(3)), at(api.value(0)), own, false); },
        },
      ];
    });
    const grey = colour("mark-total");
    if (spec.mixes.length) series.unshift({ name: "mixes", type: "line", data: spec.mixes.map(point), symbol: "circle", symbolSize: 5, color: grey, lineStyle: { width: 1, color: grey }, z: 3 });
    if (spec.chosen) series.push({ name: "to use", type: "scatter", data: [point(spec.chosen)], symbol: SYMBOLS["*"], symbolSize: 20, color: colour("mark-break-even"), itemStyle: { borderColor: theme.ink, borderWidth: 0.8 }, z: 6 });
    if (spec.bound !== null) series.push({ ...dashed(theme, "yAxis", spec.bound), name: "bound" });
    const shown = [...(spec.mixes.length ? ["mixes"] : []), ...spec.dots.map((dot) => dot.name), ...(spec.chosen ? ["to use"] : [])];
    return {
      ...base(theme, plot),
      legend: { data: shown, top: 0, left: 0, itemWidth: 18, itemGap: 12, textStyle: { color: theme.ink, fontSize: 12 }, selectedMode: false },
      grid: { left: 52, right: 16, top: width < 560 ? 92 : 64, bottom: 46 },
      xAxis: { ...speedups(spec, theme, width - 70), name: "speedup over BF16", nameLocation: "middle", nameGap: 28 },
      yAxis: { type: "value", min: 0, ...rounded(spec.top), ...axis(theme), name: "error", nameGap: 10, nameTextStyle: { color: theme.soft, fontSize: 11.5, align: "left", padding: [0, 0, 0, -40] }, axisLabel: { color: theme.soft, fontSize: 11, formatter: share } },
      series,
    };
  }

  // --- heat maps ----------------------------------------------------------------------------------------------------------

  /* The fields with their places. */
  const fields = (spec) => spec.cells.flatMap((row, y) => row.map((cell, x) => ({ ...cell, at: [x, y] })));

  /* The best recipe over a plane of two sizes: its speedup as color, its name in the field. */
  function heat(spec, theme, width, plot) {
    const left = 34 + 7 * Math.max(...spec.rows.map((name) => name.length));
    const crowded = spec.columns.length * 72 > width - left;
    const all = fields(spec);
    const shown = (value) => (spec.unit === "x" ? `${value.toFixed(2)}x` : `${plain(Math.round(value * 1e4) / 1e2)}%`);
    const text = (value) => { const at = (value - spec.low) / (spec.high - spec.low) * (spec.stops.length - 1); return onTop(spec.stops[Math.max(0, Math.min(spec.stops.length - 1, Math.round(at)))]); };
    const data = all.map((cell) => ({
      value: [...cell.at, cell.value === null ? "-" : cell.value], title: `${spec.row_name} ${spec.rows[cell.at[1]]}, ${spec.column_name} ${spec.columns[cell.at[0]]}`,
      facts: cell.text ? [[spec.unit === "x" ? "best" : spec.measure, cell.text]] : [], name: cell.label, label: { color: text(cell.value === null ? spec.low : cell.value) },
    }));
    const sizes = (list, name, gap, side) => ({ ...names(theme, list, { fontSize: 11, interval: "auto" }), name, nameLocation: "middle", nameGap: gap, ...(side || {}) });
    return {
      ...base(theme, plot),
      grid: { left, right: 8, top: 8, bottom: 92 },
      xAxis: sizes(spec.columns, spec.column_name, 26),
      yAxis: sizes(spec.rows, spec.row_name, left - 18),
      visualMap: { min: spec.low, max: spec.high, calculable: false, orient: "horizontal", left: "center", bottom: 4, precision: 2, text: [shown(spec.high), shown(spec.low)], textStyle: { color: theme.soft }, inRange: { color: spec.stops } },
      series: [
        { type: "heatmap", data, label: { show: !crowded, fontSize: 10.5, lineHeight: 13, formatter: (at) => at.data.name }, itemStyle: { borderColor: theme.paper, borderWidth: 1 }, emphasis: { itemStyle: { borderColor: theme.ink, borderWidth: 1.4 } } },
        { type: "custom", silent: true, z: 5, data: all.map((cell) => cell.at), renderItem: (at, api) => ({ type: "group", children: over(spec, all, theme, at.dataIndex, api, crowded) }) },
      ],
    };
  }

  /* On top of a field: its text where it has no speedup, the mark of the best one, and the break-even line to neighbors beyond it. */
  function over(spec, all, theme, index, api, crowded) {
    const cell = all[index];
    const [x, y] = api.coord(cell.at);
    const [width, height] = api.size([1, 1]);
    const children = [];
    if (cell.value === null && cell.text && !crowded) {
      children.push({ type: "text", x, y, style: { text: wrapped(cell.text, Math.max(6, Math.floor(width / 6))).join("\n"), fill: theme.soft, font: `10.5px ${theme.font}`, align: "center", verticalAlign: "middle" } });
    }
    if (spec.best && spec.best[0] === cell.at[0] && spec.best[1] === cell.at[1]) {
      const frame = (inset, stroke, lineWidth) => ({ type: "rect", shape: { x: x - width / 2 + inset, y: y - height / 2 + inset, width: width - 2 * inset, height: height - 2 * inset }, style: { fill: "none", stroke, lineWidth } });
      children.push(frame(2, "#ffffff", 3), frame(2, "#1b1f24", 1.2), { type: "text", x: x - width / 2 + 6, y: y - height / 2 + 5, style: { text: "\u2605", fill: "#ffffff", font: `12px ${theme.font}` } });
    }
    const side = (right, up, shape) => {
      const other = all.find((one) => one.at[0] === cell.at[0] + right && one.at[1] === cell.at[1] + up);
      const beyond = spec.unit === "%" && !other && !cell.certain; // the outline of what is kept is closed at the edges
      if (beyond || (other && other.certain !== cell.certain && (spec.unit === "%" || (other.value !== null && cell.value !== null)))) children.push({ type: "line", shape, style: { stroke: colour("mark-break-even"), lineWidth: 3 } });
    };
    side(1, 0, { x1: x + width / 2, x2: x + width / 2, y1: y - height / 2, y2: y + height / 2 });
    side(0, 1, { x1: x - width / 2, x2: x + width / 2, y1: y - height / 2, y2: y - height / 2 });
    if (cell.at[0] === 0) side(-1, 0, { x1: x - width / 2, x2: x - width / 2, y1: y - height / 2, y2: y + height / 2 });
    if (cell.at[1] === 0) side(0, -1, { x1: x - width / 2, x2: x + width / 2, y1: y + height / 2, y2: y + height / 2 });
    return children;
  }

  const lines = (spec) => Math.max(1, ...spec.cells.flat().map((cell) => cell.label.split("\n").length));
  const HEIGHTS = {
    bars: (spec) => (few(spec) ? 34 + 62 * spec.bars.length : 380),
    rates: (spec) => 46 + 21 * rateRows(spec).length,
    heat: (spec) => Math.max(spec.unit === "x" ? 400 : 240, 110 + spec.rows.length * (12 + 13 * lines(spec))),
    waterfall: (spec) => 30 + 27 * (spec.falls.length + 1),
    gains: (spec) => 34 + spec.rows.length * Math.max(38, 13 * spec.runs.length + 14),
  };
  const height = (spec) => (HEIGHTS[spec.type] || (() => 380))(spec);

  return { colour, readTheme, face, fields, few, total, ms, height, base, axis, dashed, whisker, names, options: { bars, rates, waterfall, curve, gains, scatter, heat } };
})();
