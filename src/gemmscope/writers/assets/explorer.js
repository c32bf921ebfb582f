"use strict";
/* The page of `gemmscope explore`: controls choose one of the points that were computed in advance. Text is text, never markup. */
(async () => {
  const byId = (id) => document.getElementById(id);
  const packed = Uint8Array.from(atob(byId("data").textContent), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(unpacked).text());
  const BEST = "the best";
  const FACES = { "var(--part-quantization)": "repeating-linear-gradient(45deg, var(--soft) 0 1px, var(--paper) 1px 5px)" }; // as in figures

  const node = (tag, text = "", more = {}) => Object.assign(document.createElement(tag), { textContent: text, ...more });
  const fill = (id, children) => byId(id).replaceChildren(...children);
  const key = (name) => name.toLowerCase().replace(/[^a-z]+/g, "-");
  /* Value and both ends of "1.37x [1.32, 1.43]"; null where there is none. */
  const interval = (text) => { const found = /^([\d.]+)x \[([\d.]+), ([\d.]+)\]$/.exec(text); return found && found.slice(1).map(Number); };

  // --- controls, kept in the address ---------------------------------------------------------------------------------------

  const recipes = [...new Set(data.points.flatMap((point) => (point.rows || []).map((row) => row[0])))];
  const controls = [...data.controls, ["Recipe", [BEST, ...recipes].map((name) => [name, ""])]];
  const selects = controls.map(([name, values]) => {
    const select = node("select", "", { id: key(name) });
    select.append(...values.map(([label], place) => node("option", label, { value: String(place) })));
    select.addEventListener("change", () => { history.replaceState(null, "", address()); show(); });
    return select;
  });
  fill("controls", controls.map(([name], place) => { const label = node("label", name); label.append(selects[place]); return label; }));
  const chosen = (place) => controls[place][1][Number(selects[place].value)];
  const address = () => `#${new URLSearchParams(controls.map(([name], place) => [key(name), chosen(place)[0]]))}`;

  /* Set the controls to what the address says; what it does not say stays as it is. */
  function restore() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    controls.forEach(([name, values], place) => {
      const at = values.findIndex(([label]) => label === wanted.get(key(name)));
      if (at >= 0) selects[place].value = String(at);
    });
  }

  // --- the point -----------------------------------------------------------------------------------------------------------

  function show() {
    const place = data.controls.reduce((at, [, values], index) => at * values.length + Number(selects[index].value), 0);
    const point = data.points[place];
    const flags = data.controls.map((_, index) => chosen(index)[1]).filter(Boolean);
    byId("command").textContent = [data.command, ...flags].join(" ");
    const rows = point.rows || [];
    const wanted = chosen(controls.length - 1)[0];
    const name = wanted === BEST || !rows.some((row) => row[0] === wanted) ? point.best || (rows.length ? rows[0][0] : "") : wanted;
    byId("answer").textContent = point.answer || `Not possible: ${point.why_not}`;
    const missing = wanted !== BEST && rows.length && name !== wanted ? [`${wanted} does not run here.`] : [];
    fill("because", [...(point.because || []), ...missing].map((line) => node("p", line, { className: "because" })));
    const row = rows.find((one) => one[0] === name) || [];
    const columns = point.columns || [];
    fill("figures", columns.slice(1).map((column, at) => {
      const box = document.createElement("div");
      const [value, range] = [(row[at + 1] || "-").replace(/ \[.*/, ""), (/\[.*\]/.exec(row[at + 1] || "") || [""])[0]];
      box.append(node("dt", column), node("dd", value), node("dd", range, { className: "aside" }));
      return box;
    }));
    table(columns, rows, name);
    speedups(columns, rows, name, point.colors || []);
    parts(rows, name, point.parts || []);
  }

  function table(columns, rows, name) {
    const head = node("tr");
    head.append(...columns.map((column) => node("th", column)));
    const body = rows.map((row) => {
      const line = node("tr", "", { className: row[0] === name ? "chosen" : "" });
      const pick = node("button", row[0], { type: "button", title: `Show ${row[0]}` });
      pick.addEventListener("click", () => select(row[0]));
      const first = node("td");
      first.append(pick);
      line.append(first, ...row.slice(1).map((text) => node("td", text)));
      return line;
    });
    fill("table", columns.length ? [head, ...body] : []);
  }

  function select(recipe) {
    const place = controls.length - 1;
    selects[place].value = String(controls[place][1].findIndex(([label]) => label === recipe));
    selects[place].dispatchEvent(new Event("change"));
  }

  const box = (left, width, color, className = "") => {
    const drawn = node("i", "", { className });
    Object.assign(drawn.style, { left: `${left}%`, width: `${Math.max(width, 0)}%`, ...(color ? { background: FACES[color] || color } : {}) });
    return drawn;
  };

  function bar(label, is_chosen) {
    const line = node("div", "", { className: is_chosen ? "bar chosen" : "bar" });
    const track = node("div");
    line.append(node("span", label), track);
    return [line, track];
  }

  function speedups(columns, rows, name, colors) {
    const at = columns.findIndex((column) => column.startsWith("Speedup"));
    const known = rows.map((row, place) => [row[0], interval(row[at] || ""), colors[place]]).filter(([, gain]) => gain);
    const most = Math.max(1, ...known.map(([, gain]) => gain[2])) * 1.04;
    fill("speedups", known.map(([recipe, [value, low, high], color]) => {
      const [line, track] = bar(`${recipe} ${value}x`, recipe === name);
      const one = box(100 / most, 0, "", "one");
      track.append(box(0, 100 * value / most, `var(--${color})`), box(100 * low / most, 100 * (high - low) / most, "", "range"), one);
      return line;
    }));
  }

  function parts(rows, name, all) {
    const totals = all.map((own) => own.reduce((sum, [, , ms]) => sum + ms, 0));
    const most = Math.max(1e-9, ...totals);
    const legend = new Map();
    fill("parts", rows.map((row, place) => {
      const [line, track] = bar(row[0], row[0] === name);
      for (const [part, color, ms] of all[place] || []) {
        legend.set(part, color);
        track.append(Object.assign(box(0, 100 * ms / most, `var(--${color})`), { title: `${part}: ${ms.toLocaleString("en-US")} ms` }));
      }
      return line;
    }));
    const own = all[rows.findIndex((row) => row[0] === name)] || [];
    fill("legend", [...legend].map(([part, color]) => {
      const found = own.find(([other]) => other === part);
      const entry = node("span", `${part}${found ? ` ${found[2].toLocaleString("en-US", { maximumSignificantDigits: 4 })} ms` : ""}`);
      entry.prepend(box(0, 0, `var(--${color})`));
      entry.firstChild.style.width = ".8em";
      return entry;
    }));
  }

  byId("about").textContent = data.about.join(" · ");
  addEventListener("hashchange", () => { restore(); show(); });
  restore();
  show();
  document.documentElement.dataset.ready = "yes";
})();
