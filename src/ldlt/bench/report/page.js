(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector, root = document) => root.querySelector(selector);
  const SVG = "http://www.w3.org/2000/svg";

  const state = {
    protocol: 0,
    metric: 0,
    text: "",
    families: new Set(data.families.flatMap((family, index) => (family.certified ? [index] : []))),
    tone: "value",
    sort: { key: "name", down: false },
    radius: 8,
  };

  // Names are untrusted: text enters the page by textContent and attributes only, never as HTML.
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const draw = (name, attributes = {}, ...children) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const percent = (share, digits = 1) => (100 * share).toFixed(digits).replace(/^-(?=0\.0*$)/, "").replace("-", "−");
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const panel = () => one(`[data-panel="${state.protocol}"]`);
  const chosen = () => data.families.flatMap((_, index) => (state.families.has(index) && present(index) ? [index] : []));
  const present = (family) => data.protocols[state.protocol].sets.some((set) => set.v[family]);
  const found = () => {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    return data.protocols[state.protocol].sets.filter((set) => words.every((word) => set.n.toLowerCase().includes(word)));
  };
  const badge = () => make("span", { class: "badge" }, "not certified");

  // -------------------- curves

  // Every family has its own marker as well as its own colour.
  const marker = (slot, x, y, r = 3.4) => {
    const polygon = (points) => draw("polygon", { class: "tip", points: points.map(([a, b]) => `${x + r * a},${y + r * b}`).join(" ") });
    return [
      () => draw("circle", { class: "tip", cx: x, cy: y, r }),
      () => draw("rect", { class: "tip", x: x - r * 0.9, y: y - r * 0.9, width: 1.8 * r, height: 1.8 * r }),
      () => polygon([[0, -1.25], [1.15, 0.85], [-1.15, 0.85]]),
      () => polygon([[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]]),
      () => polygon([[0, 1.25], [1.15, -0.85], [-1.15, -0.85]]),
      () => polygon([[-1.2, -0.5], [-0.5, -1.2], [0.5, -1.2], [1.2, -0.5], [1.2, 0.5], [0.5, 1.2], [-0.5, 1.2], [-1.2, 0.5]]),
      () => polygon([[-1.25, 0], [0.85, -1.15], [0.85, 1.15]]),
      () => polygon([[1.25, 0], [-0.85, -1.15], [-0.85, 1.15]]),
      () => polygon([[-1.2, -1.2], [0, -0.5], [1.2, -1.2], [0.5, 0], [1.2, 1.2], [0, 0.5], [-1.2, 1.2], [-0.5, 0]]),
    ][slot]();
  };

  const meanCurves = () => {
    const families = chosen();
    const sets = found().filter((set) => set.ok && families.length && families.every((family) => set.c[family]));
    const curves = families.map((family) => ({
      family,
      values: data.radii.map((_, i) => sets.reduce((sum, set) => sum + set.c[family][i], 0) / (1e4 * Math.max(sets.length, 1))),
    }));
    return { curves: sets.length ? curves : [], count: sets.length };
  };

  let shown = { curves: [], count: 0 };

  const drawCurves = () => {
    const root = panel();
    const box = one("[data-plot]", root);
    shown = meanCurves();
    const note = one("[data-curves-note]", root);
    box.replaceChildren();
    if (!shown.count) {
      box.append(make("p", { class: "empty" }, chosen().length ? "No complete data set with curves matches the filters." : "Tick a family to see its curve."));
      one("[data-readout]", root).replaceChildren();
      one("[data-radius]", root).textContent = "";
      note.textContent = "";
      return;
    }
    note.textContent = `Mean over ${plural(shown.count, "complete data set")}${state.text ? ` matching “${state.text}”` : ""}. ` +
      "Vertical lines mark the radii of the metrics. Move the pointer over the plot, or focus it and use the arrow keys, to read values.";
    const width = Math.max(box.clientWidth - 20, 240);
    const height = Math.round(Math.min(400, Math.max(260, width * 0.58)));
    const pad = { left: 42, right: 12, top: 22, bottom: 40 };
    const last = data.radii[data.radii.length - 1];
    const x = (radius) => pad.left + (radius / last) * (width - pad.left - pad.right);
    const y = (share) => pad.top + (1 - share) * (height - pad.top - pad.bottom);
    const svg = draw("svg", {
      viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "slider", "aria-label": "Certified accuracy by radius",
      "aria-valuemin": 0, "aria-valuemax": last,
    });
    for (let share = 0; share <= 1.001; share += 0.2) {
      svg.append(draw("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: y(share), y2: y(share) }));
      svg.append(draw("text", { x: pad.left - 8, y: y(share) + 4, "text-anchor": "end" }, percent(share, 0)));
    }
    for (const radius of [0, 0.5, 1, 1.5, 2]) {
      svg.append(draw("text", { x: x(radius), y: height - pad.bottom + 18, "text-anchor": "middle" }, String(radius)));
    }
    svg.append(draw("text", { x: (pad.left + width - pad.right) / 2, y: height - 4, "text-anchor": "middle" }, "radius"));
    svg.append(draw("text", { x: 0, y: 10 }, "certified accuracy, %"));
    data.metrics.forEach((metric, index) => {
      if (!metric.radius) return;
      const kind = index === state.metric ? "mark-radius now" : "mark-radius";
      svg.append(draw("line", { class: kind, x1: x(metric.radius), x2: x(metric.radius), y1: pad.top, y2: height - pad.bottom }));
    });
    for (const { family, values } of shown.curves) {
      const { slot, certified, name } = data.families[family];
      const group = draw("g", { class: `s${slot}`, "data-curve": name });
      const path = values.map((value, i) => `${i ? "L" : "M"}${x(data.radii[i]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      group.append(draw("path", { class: certified ? "line" : "line refused", d: path }));
      for (let i = 2 + (slot % 3); i < values.length; i += 7) group.append(marker(slot, x(data.radii[i]), y(values[i])));
      svg.append(group);
    }
    const cross = draw("g", { "data-cross": "" });
    svg.append(cross);
    const move = (index) => {
      state.radius = Math.min(Math.max(index, 0), data.radii.length - 1);
      readRadius(svg, cross, x, y, pad, height);
    };
    svg.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect();
      const at = ((event.clientX - place.left) / place.width) * width;
      move(Math.round(((at - pad.left) / (width - pad.left - pad.right)) * (data.radii.length - 1)));
    });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 5, PageDown: -5 }[event.key];
      const target = step ? state.radius + step : { Home: 0, End: data.radii.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      move(target);
    });
    box.append(svg);
    move(state.radius);
  };

  const readRadius = (svg, cross, x, y, pad, height) => {
    const radius = data.radii[state.radius];
    cross.replaceChildren(draw("line", { class: "cross", x1: x(radius), x2: x(radius), y1: pad.top, y2: height - pad.bottom }));
    const rows = shown.curves.map(({ family, values }) => ({ family, value: values[state.radius] })).sort((a, b) => b.value - a.value);
    const list = one("[data-readout]", panel());
    list.replaceChildren();
    for (const { family, value } of rows) {
      const { name, slot, certified } = data.families[family];
      cross.append(draw("circle", { class: `here s${slot}`, cx: x(radius), cy: y(value), r: 4.5 }));
      const key = draw("svg", { viewBox: "0 0 26 12", "aria-hidden": "true" }, draw("path", { class: certified ? "line" : "line refused", d: "M0 6H26" }), marker(slot, 13, 6));
      const item = make("li", { class: `s${slot}` }, key, make("span", {}, make("bdi", {}, name)), make("b", {}, percent(value)));
      if (!certified) one("span", item).append(badge());
      list.append(item);
    }
    one("[data-radius]", panel()).textContent = `At radius ${radius.toFixed(2)}, %`;
    svg.setAttribute("aria-valuenow", radius);
    svg.setAttribute("aria-valuetext", `radius ${radius.toFixed(2)}: ${rows.map((row) => `${data.families[row.family].name} ${percent(row.value)} %`).join(", ")}`);
  };

  // -------------------- table of data sets

  const drawHeat = () => {
    const root = panel();
    const box = one("[data-heat]", root);
    const families = chosen();
    const value = (set, family) => (set.v[family] ? set.v[family][state.metric] / 1e6 : null);
    const rows = found().map((set) => {
      const scores = families.map((family) => value(set, family));
      // The best is taken among certified families: a claim without a certificate sets no standard.
      const known = scores.filter((score, i) => score !== null && data.families[families[i]].certified);
      const best = known.length ? Math.max(...known) : null;
      return { set, scores, best, spread: known.length > 1 ? best - Math.min(...known) : null };
    });
    const { key, down } = state.sort;
    const column = families.indexOf(key);
    const measure = (row) => (key === "spread" ? row.spread : column >= 0 ? row.scores[column] : null);
    const collator = new Intl.Collator("en", { numeric: true });
    rows.sort((a, b) => {
      const [p, q] = [measure(a), measure(b)];
      const tie = collator.compare(a.set.n, b.set.n);
      if (key === "name" || (column < 0 && key !== "spread")) return down ? -tie : tie;
      if (p === null || q === null) return (p === null) - (q === null) || tie;
      return (down ? q - p : p - q) || tie;
    });

    const every = data.protocols[state.protocol].sets.flatMap((set) => data.families.map((_, family) => value(set, family))).filter((v) => v !== null);
    const gap = state.tone === "gap";
    const low = gap ? 0 : every.reduce((a, b) => Math.min(a, b), 1);
    const high = gap ? 0.2 : every.reduce((a, b) => Math.max(a, b), 0);
    const scale = one("[data-scale]", root);
    scale.className = gap ? "scale gap" : "scale";
    scale.replaceChildren(gap ? "best" : percent(low, 0), make("i"), gap ? "20 points or more below" : percent(high, 0));

    const table = make("table", { class: gap ? "heat gap" : "heat", style: `--n:${families.length + 1}` });
    table.append(make("caption", {}, `${data.metrics[state.metric].label} of all data sets in percent`));
    const titles = make("tr");
    const title = (text, sortKey, refused = false) => {
      const button = make("button", { type: "button", "data-sort": String(sortKey) }, text);
      const cell = make("th", { scope: "col", class: sortKey === "name" ? "" : "num" }, button);
      if (sortKey === key) {
        cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        button.append(down ? " ↓" : " ↑");
      }
      if (refused) button.append(badge());
      button.addEventListener("click", () => {
        state.sort = { key: sortKey, down: sortKey === key ? !down : sortKey !== "name" };
        drawHeat();
        one(`[data-sort="${String(sortKey)}"]`, box).focus({ preventScroll: true });
      });
      titles.append(cell);
    };
    title("Data set", "name");
    families.forEach((family) => title(data.families[family].name, family, !data.families[family].certified));
    title("Spread", "spread");
    table.append(make("thead", {}, titles));

    const body = make("tbody");
    for (const { set, scores, best, spread } of rows) {
      const name = make("th", { scope: "row", title: set.n }, make("bdi", {}, set.n), set.ok ? "" : " †");
      const line = make("tr", { "data-set": set.n }, name);
      scores.forEach((score, i) => {
        if (score === null) {
          line.append(make("td", { class: "none" }, "–"));
          return;
        }
        const shade = Math.min(Math.max(((gap ? best - score : score - low) / (high - low || 1)), 0), 1);
        const kinds = ["cell", best !== null && score >= best - 1e-9 && data.families[families[i]].certified ? "best" : ""];
        const cell = make("td", { class: kinds.filter(Boolean).join(" ") }, percent(score));
        cell.style.setProperty("--h", `${(100 * shade).toFixed(0)}%`);
        line.append(cell);
      });
      line.append(make("td", {}, spread === null ? "–" : percent(spread)));
      body.append(line);
    }
    table.append(body);

    const paired = rows.filter((row) => row.set.ok && row.scores.every((score) => score !== null));
    if (paired.length && families.length) {
      const foot = make("tfoot");
      const means = make("tr", { "data-foot": "mean" }, make("th", { scope: "row" }, `Mean of ${paired.length}`));
      const counts = make("tr", { "data-foot": "best" }, make("th", { scope: "row" }, "Best on"));
      families.forEach((family, i) => {
        means.append(make("td", {}, percent(paired.reduce((sum, row) => sum + row.scores[i], 0) / paired.length)));
        const certified = data.families[family].certified;
        counts.append(make("td", {}, certified ? String(paired.filter((row) => row.scores[i] >= row.best - 1e-9).length) : "–"));
      });
      const spreads = paired.filter((row) => row.spread !== null);
      means.append(make("td", {}, spreads.length ? percent(spreads.reduce((sum, row) => sum + row.spread, 0) / spreads.length) : "–"));
      counts.append(make("td"));
      foot.append(means, counts);
      table.append(foot);
    }
    box.replaceChildren(rows.length ? table : make("p", { class: "empty" }, "No data set matches the filter."));
    const partial = rows.some((row) => !row.set.ok) ? " † incomplete: not in the statistics, nor in the mean." : "";
    one("[data-heat-note]", root).textContent =
      `${data.metrics[state.metric].label}. Spread is best minus worst certified family; bold marks the best of a row. “Best on” counts ties for each.${partial}`;
  };

  // -------------------- everything that follows the filters

  const update = () => {
    const metric = data.metrics[state.metric].key;
    all("[data-panel]").forEach((node) => { node.hidden = Number(node.dataset.panel) !== state.protocol; });
    all("[data-tab]").forEach((node) => {
      const on = Number(node.dataset.tab) === state.protocol;
      node.setAttribute("aria-selected", String(on));
      node.tabIndex = on ? 0 : -1;
    });
    all("[data-metric]").forEach((node) => { node.hidden = node.dataset.metric !== metric; });
    all("[data-m]").forEach((node) => node.classList.toggle("now", node.dataset.m === metric));
    all("[data-pick]").forEach((node) => node.setAttribute("aria-pressed", String(node.dataset.pick === metric)));
    all("[data-fams]").forEach((node) => { node.hidden = !node.dataset.fams.split(" ").every((family) => state.families.has(Number(family))); });
    all("[data-dim]").forEach((node) => node.classList.toggle("dim", !state.families.has(Number(node.dataset.dim))));
    all("[data-section]").forEach((node) => { node.hash = `#p${state.protocol}-${node.dataset.section}`; });
    const sets = data.protocols[state.protocol].sets;
    document.getElementById("status").textContent =
      `${data.metrics[state.metric].label} · ${found().length} of ${plural(sets.length, "data set")} · ${chosen().length} of ${data.families.length} families shown. Tests always use all certified families and all complete data sets.`;
    drawCurves();
    drawHeat();
  };

  const pickMetric = (key) => {
    state.metric = Math.max(data.metrics.findIndex((metric) => metric.key === key), 0);
    one(`#metric input[value="${data.metrics[state.metric].key}"]`).checked = true;
    const radius = data.metrics[state.metric].radius;
    state.radius = data.radii.reduce((best, r, i) => (Math.abs(r - radius) < Math.abs(data.radii[best] - radius) ? i : best), 0);
    update();
  };

  const tabs = all("[data-tab]");
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => { state.protocol = index; update(); });
    tab.addEventListener("keydown", (event) => {
      const target = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      state.protocol = (target + tabs.length) % tabs.length;
      update();
      tabs[state.protocol].focus();
    });
  });
  all("#metric input").forEach((input) => input.addEventListener("change", () => pickMetric(input.value)));
  all("[data-pick]").forEach((card) => card.addEventListener("click", () => pickMetric(card.dataset.pick)));
  all("[data-family]").forEach((box) => {
    box.checked = state.families.has(Number(box.dataset.family));
    box.addEventListener("change", () => {
      state.families[box.checked ? "add" : "delete"](Number(box.dataset.family));
      update();
    });
  });
  all('input[name$="-tone"]').forEach((input) => input.addEventListener("change", () => {
    state.tone = input.value;
    all('input[name$="-tone"]').forEach((other) => { other.checked = other.value === state.tone; });
    drawHeat();
  }));
  const search = document.getElementById("search");
  search.value = "";
  search.addEventListener("input", () => { state.text = search.value.trim(); update(); });
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());

  // -------------------- theme, places, print

  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  // Storage may be forbidden for local files.
  const remember = (value) => { try { localStorage.setItem("ldlt-theme", value); } catch { /* not kept */ } };
  const remembered = () => { try { return localStorage.getItem("ldlt-theme"); } catch { return null; } };
  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const label = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  if (["light", "dark"].includes(remembered())) document.documentElement.dataset.theme = remembered();
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remember(document.documentElement.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      all(".toc a").forEach((link) => {
        if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      });
    }
  }, { rootMargin: "-25% 0px -65% 0px" });
  all("main section").forEach((section) => watcher.observe(section));

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // only the height moved: phones hide their address bar
    width = innerWidth;
    drawCurves();
  });
  addEventListener("beforeprint", () => all("details").forEach((node) => { node.open = true; }));

  document.documentElement.classList.add("js");
  document.getElementById("controls").hidden = false;
  theme.hidden = false;
  pickMetric(data.metrics[0].key);
  state.radius = 8;
  drawCurves();
})();
