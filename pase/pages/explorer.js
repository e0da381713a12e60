/* The explorer: the model as a graph that unfolds, the details of a layer, and a map of what each device holds and which devices communicate. */
function explorer(root) {
  const nodes = data.nodes, moves = data.moves, shown = data.order, stages = data.stages;
  /* The stages of a rank that have a node, and how a stage splits the node. Without stages, there is one stage with all devices. */
  const stagesWith = (i, rank) => (stages ? (stages.of[i] ?? stages.list.map((_, k) => k)).filter((k) => stages.list[k].rank === rank) : [0]);
  const splitIn = (i, stage) => (stages && stages.splits[stages.list[stage].splits][i]) || nodes[i].split;
  const whole = Math.max(...shown.map((i) => sum(nodes[i].cost)), 0);
  const PARTS = ["compute", "communication", "update"];
  /* Some axes by the name that they share, as data for data and data2, with how much of its ways are meant if not all. */
  const ways = (axes) => axes.reduce((w, a) => w * data.mesh.sizes[data.mesh.names.indexOf(a)], 1);
  const stem = (a) => { const s = a.replace(/\d+$/, ""); return data.mesh.names.includes(s) ? s : a; };
  function together(axes) {
    const stems = [...new Set(axes.map(stem))];
    return stems.map((s) => {
      const some = ways(axes.filter((a) => stem(a) === s)), all = ways(data.mesh.names.filter((a) => stem(a) === s));
      return some === all ? s : `${s} (${some} of ${all})`;
    }).join("·");
  }
  /* A device's place in the mesh, axes of one name together. */
  function located(at) {
    const names = data.mesh.names, found = new Map();
    names.forEach((a, k) => found.set(stem(a), (found.get(stem(a)) ?? 0) * data.mesh.sizes[k] + at[k]));
    return [...found].map(([a, k]) => `${a} ${k}`).join(", ");
  }
  function sum(xs) { return xs.reduce((a, b) => a + b, 0); }
  function total(i) { return sum(nodes[i].cost); }

  /* Groups of neighbours with the same path, each open or closed. */
  const top = { children: [], depth: -1, open: true };
  for (const i of shown) {
    let at = top;
    for (const name of nodes[i].path) {
      const last = at.children.at(-1);
      if (last && last.children && last.name === name) at = last;
      else { const group = { name, children: [], depth: at.depth + 1, open: false, parent: at }; at.children.push(group); at = group; }
    }
    at.children.push({ node: i, depth: at.depth + 1, parent: at });
  }
  const leaves = (item) => (item.children ? item.children.flatMap(leaves) : [item.node]);
  const open = (item) => { if (item.children) { item.open = true; item.children.forEach(open); } };
  if (shown.length <= 60) open(top);
  else top.children.filter((c) => c.children && top.children.length < 12).forEach((c) => (c.open = c.children.length < 40));

  const tree = el("div", { role: "tree", "aria-label": "The model's layers in the order in which they run" });
  const detail = el("div", { class: "panel", "aria-live": "polite" });
  const map = el("div", { class: "panel" });
  const search = el("input", { type: "search", placeholder: "Search layers", "aria-label": "Search layers" });
  const press = (text, act) => el("button", { type: "button", onclick: act }, text);
  const every = (item, value) => { if (item.children) { item.children.forEach((c) => every(c, value)); if (item !== top) item.open = value; } };
  const tools = el("div", { class: "tools" }, search,
    press("Unfold all", () => { every(top, true); draw(); }), press("Fold all", () => { every(top, false); draw(); }));
  root.replaceChildren(el("div", { class: "split" }, el("div", {}, tools, tree, map), detail));

  let rows = [], chosen = null;
  function visible(item, out) {
    for (const child of item.children) { out.push(child); if (child.children && child.open) visible(child, out); }
    return out;
  }
  function draw(focus = false) {
    rows = visible(top, []);
    const gutter = root.clientWidth < 600 ? 22 : 40, most = Math.max(whole, ...rows.map((r) => sum(leaves(r).map(total))));
    const made = rows.map((r, k) => {
      const inside = leaves(r), costs = PARTS.map((_, p) => sum(inside.map((i) => nodes[i].cost[p]))), n = r.node === undefined ? null : nodes[r.node];
      const times = n ? n.times : Math.max(...inside.map((i) => nodes[i].times));
      const repeated = times > 1 && (!r.parent || r.parent === top || n) && !(n && r.parent !== top) ? ` ×${count(times)}` : "";
      const name = (r.children ? (r.open ? "▾ " : "▸ ") : "") + (n ? n.name : r.name) + repeated;
      const track = el("span", { class: "track" }, ...costs.map((c, p) => { const s = el("i", { class: `f-${PARTS[p]}` }); s.style.width = `${most > 0 ? (100 * c) / most : 0}%`; return s; }));
      const item = el("div", {
        role: "treeitem", "aria-level": String(r.depth + 1), "aria-selected": String(r === chosen), tabindex: r === chosen || (!chosen && k === 0) ? "0" : "-1",
        "aria-expanded": r.children ? String(r.open) : undefined, "aria-label": `${n ? n.name : r.name}${repeated}, ${cost(sum(costs))}`,
        onclick: () => { if (r.children && r === chosen) r.open = !r.open; choose(r); },
      }, el("span", {}, name), track, el("span", { class: "when" }, cost(sum(costs))));
      item.style.paddingLeft = `${gutter + 14 * r.depth}px`;
      return item;
    });
    tree.replaceChildren(arcs(gutter), ...made);
    if (focus && chosen) { const k = rows.indexOf(chosen); made[k]?.focus({ preventScroll: true }); made[k]?.scrollIntoView({ block: "nearest" }); }
  }
  /* Lines from producers to readers, between the visible rows; orange if the edge moves data between devices. */
  function arcs(gutter) {
    const NS = "http://www.w3.org/2000/svg", H = 28, row = new Map(), seen = new Map();
    rows.forEach((r, k) => { if (!r.children || !r.open) leaves(r).forEach((i) => row.set(i, k)); });
    for (const i of shown)
      for (const j of nodes[i].reads) {
        const a = row.get(j), b = row.get(i);
        if (a === undefined || b === undefined || a === b) continue;
        const paid = nodes[i].moves.some((m) => moves[m].source === j), at = `${a},${b}`;
        seen.set(at, { a, b, paid: paid || (seen.get(at)?.paid ?? false) });
      }
    const svg = document.createElementNS(NS, "svg"), near = chosen ? rows.indexOf(chosen) : -1;
    svg.setAttribute("width", gutter); svg.setAttribute("height", rows.length * H); svg.setAttribute("aria-hidden", "true");
    for (const { a, b, paid } of [...seen.values()].slice(0, 4000)) {
      const path = document.createElementNS(NS, "path"), x = gutter - 5, out = x - Math.min(x - 2, 6 + 4 * Math.sqrt(Math.abs(b - a)));
      path.setAttribute("d", `M${x} ${a * H + H / 2}C${out} ${a * H + H / 2} ${out} ${b * H + H / 2} ${x} ${b * H + H / 2}`);
      path.setAttribute("class", a === near || b === near ? "near" : paid ? "moves" : "");
      svg.append(path);
    }
    return svg;
  }
  function choose(item, focus = true) {
    chosen = item;
    draw(focus);
    if (item.node === undefined) group(item);
    else layer(item.node);
  }
  tree.addEventListener("keydown", (e) => {
    const k = rows.indexOf(chosen ?? rows[0]), r = rows[k];
    const acts = {
      ArrowDown: () => rows[k + 1] && choose(rows[k + 1]), ArrowUp: () => rows[k - 1] && choose(rows[k - 1]),
      Home: () => choose(rows[0]), End: () => choose(rows.at(-1)),
      ArrowRight: () => { if (r.children && !r.open) { r.open = true; choose(r); } else if (r.children) choose(r.children[0]); },
      ArrowLeft: () => { if (r.children && r.open) { r.open = false; choose(r); } else if (r.parent !== top) choose(r.parent); },
      Enter: () => { if (r.children) r.open = !r.open; choose(r); }, " ": () => acts.Enter(),
    };
    if (acts[e.key]) { e.preventDefault(); acts[e.key](); }
  });
  function reveal(i) {
    const find = (item) => item.children?.map((c) => (c.node === i ? c : find(c))).find(Boolean);
    const item = find(top);
    if (!item) return;
    for (let p = item.parent; p; p = p.parent) p.open = true;
    choose(item);
  }
  search.addEventListener("keydown", (e) => { if (e.key === "Enter") next(); });
  function next() {
    const text = search.value.trim().toLowerCase(), hits = shown.filter((i) => nodes[i].name.toLowerCase().includes(text));
    if (!text || !hits.length) return;
    const now = chosen?.node ?? -1;
    reveal(hits.find((i) => i > now) ?? hits[0]);
    search.focus();
  }

  /* A split without some dims. "pending" is for partial sums of gradients, "state" for the optimizer's state. */
  const without = (split, ...dims) => Object.fromEntries(Object.entries(split).filter(([d]) => !dims.includes(d)));
  const words = (split) => Object.entries(without(split, "pending")).map(([d, axes]) => `${d} over ${together(axes)}`).join(", ") || "not split";
  function grid(head, body) {
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head[0] }, el("table", {},
      el("thead", {}, el("tr", {}, ...head.map((h, k) => el("th", { scope: "col", class: k > 1 ? "n" : "" }, h)))),
      el("tbody", {}, ...body.map((r) => el("tr", {}, ...r.map((c, k) => el("td", { class: k > 1 ? "n" : "" }, c)))))));
  }
  function facts(pairs) {
    return el("dl", { class: "facts" }, ...pairs.filter(([, v]) => v).flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)]));
  }
  function shape(n) { return Object.entries(n.sizes).map(([d, s]) => `${d} ${count(s)}`).join(", "); }
  function group(item) {
    const inside = leaves(item), costs = PARTS.map((_, p) => sum(inside.map((i) => nodes[i].cost[p])));
    const heavy = [...inside].sort((a, b) => total(b) - total(a)).slice(0, 6);
    detail.replaceChildren(el("h3", {}, item.name), facts([
      ["layers", count(inside.length)], ["a step", cost(sum(costs))],
      ...PARTS.map((p, k) => [p, costs[k] ? cost(costs[k]) : ""]),
      ["kept on a device", stages ? "" : bytes(sum(inside.map((i) => sum(Object.values(nodes[i].keeps)))))],
    ]), grid(["most expensive", "split", "a step"], heavy.map((i) => [nodes[i].name, words(nodes[i].split), cost(total(i))])));
    devices(heavy[0]);
  }
  /* How the stages that have a node split it, with one row for all stages that split it equally. */
  function inStages(i) {
    const rows = new Map();
    for (const k of stages.of[i] ?? stages.list.keys()) {
      const text = words(splitIn(i, k));
      rows.set(text, [...(rows.get(text) ?? []), k]);
    }
    return [...rows].map(([text, ks]) => [text, spans(ks)]);
  }
  const spans = (ks) => ks.reduce((out, k) => { const last = out.at(-1); if (last && last[1] === k - 1) last[1] = k; else out.push([k, k]); return out; }, []).map(([a, b]) => (a === b ? a : `${a} to ${b}`)).join(", ");
  function layer(i) {
    const n = nodes[i], weights = n.reads.filter((j) => nodes[j].role === "parameter");
    const next = n.next === null ? "" : n.next === "impossible" ? "no other split is possible" : `the step costs at least ${(100 * n.next).toFixed(2)}% more`;
    detail.replaceChildren(...[
      el("h3", {}, n.name + (n.times > 1 ? ` ×${count(n.times)}` : "")),
      facts([["op", `${n.op}  ${n.einsum}`], ["sizes", shape(n)], ["split", words(n.split)], ["with another split", next],
        ["a step", PARTS.map((p, k) => (n.cost[k] ? `${p} ${cost(n.cost[k])}` : null)).filter(Boolean).join(", ") || "nothing"],
        ["a device keeps", Object.entries(n.keeps).map(([k, b]) => `${k} ${bytes(b)}`).join(", ")],
        ["while recomputed", n.recompute ? bytes(n.recompute) : ""], ["written at", n.source]]),
      stages ? el("h3", {}, "In the stages") : null,
      stages ? grid(["split", "stages"], inStages(i)) : null,
      n.moves.length ? el("h3", {}, "Collectives and their reasons") : null,
      n.moves.length ? grid(["why", "between", "bytes", stages ? "times, all ranks" : "times", "a step"], n.moves.map((m) => [moves[m].why, together(moves[m].axes), bytes(moves[m].bytes), count(moves[m].times), cost(moves[m].cost)])) : null,
      n.work.length ? el("h3", {}, "Work of one device") : null,
      n.work.length ? grid(["pass", "work", "GFLOP", "bytes", "a step"], n.work.map((w) => [w.phase, `${w.kind} ${w.dtype}`, Number((w.flops / 1e9).toPrecision(3)).toLocaleString("en"), bytes(w.bytes), cost(w.cost)])) : null,
      weights.length ? el("h3", {}, "Its parameters") : null,
      weights.length ? grid(["parameter", "stored", "a device"], weights.map((j) => [nodes[j].name, words(nodes[j].split), nodes[j].keeps.parameters === undefined ? "" : bytes(nodes[j].keeps.parameters)])) : null,
    ].filter(Boolean));
    devices(i);
  }

  /* The mesh: devices in the order of their numbers, hosts side by side. With stages, there is a band for each rank. */
  const { names, sizes, host } = data.mesh, EACH = sizes.reduce((a, b) => a * b, 1), RANKS = stages ? stages.ranks : 1, D = EACH * RANKS;
  const strides = sizes.map((_, k) => sizes.slice(k + 1).reduce((a, b) => a * b, 1));
  const place = (device) => sizes.map((s, k) => Math.floor((device % EACH) / strides[k]) % s), rankOf = (device) => Math.floor(device / EACH);
  let device = 0;
  const canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "map of devices" });
  const view = el("select", { "aria-label": "What the map shows" });
  const said = el("p", { class: "said", "aria-live": "polite" });
  map.replaceChildren(el("h3", {}, "What each device holds, and which devices communicate"), el("div", { class: "tools" }, el("label", {}, "Show ", view)), canvas, said);
  let views = [], COLUMNS = 1, CELL = 1, ROWS = 1;
  const HEAD = stages ? 20 : 0, bandTop = (rank) => rank * (ROWS * CELL + HEAD + (stages ? 6 : 0)) + HEAD;
  function shard(split, at) {
    let index = 0, ways = 1;
    const parts = [];
    for (const [d, axes] of Object.entries(split)) {
      let i = 0, w = 1;
      for (const a of axes) { const k = names.indexOf(a); i = i * sizes[k] + at[k]; w *= sizes[k]; }
      parts.push(`${d} ${i + 1} of ${w}`);
      index = index * w + i; ways *= w;
    }
    return { index, ways, text: parts.join(", ") || "all of it" };
  }
  const rest = (axes) => Object.fromEntries(names.filter((a) => !axes.includes(a)).map((a) => [a, [a]]));
  const keep = (split) => () => split;
  /* The split of a node by rank, for a view; null if no stage of the rank has the node. */
  const splitBy = (i, ...dims) => (rank) => { const s = stagesWith(i, rank)[0]; return s === undefined ? null : without(splitIn(i, s), ...dims); };
  function devices(i) {
    const n = nodes[i], before = view.value;
    const same = (rank) => { const s = stagesWith(i, rank)[0]; return s !== undefined && JSON.stringify(splitIn(i, s)) === JSON.stringify(n.split); };
    views = [...(n.role === "parameter" ? [] : [{ text: `the part of ${n.name} that each device works on`, split: splitBy(i, "pending", "state"), verb: "works on" }]),
      ...[i, ...n.reads].filter((j) => nodes[j].role === "parameter").flatMap((j) => stored(j)),
      ...n.moves.map((m) => ({ text: `${moves[m].kind.replaceAll("_", "-")}, ${moves[m].phase}: ${moves[m].why}`, axes: moves[m].axes, split: (rank) => (same(rank) ? rest(moves[m].axes) : null), absent: "moves nothing so: it splits this otherwise, or has none of it" })),
      ...(stages ? [{ text: "what a stage sends to the next one: each micro-batch's activations, and their gradients back", sends: true, split: keep(rest([])) }] : [])];
    view.replaceChildren(...views.map((v, k) => el("option", { value: String(k) }, v.text.length > 90 ? `${v.text.slice(0, 88)}…` : v.text)));
    view.value = Number(before) < views.length && before ? before : "0";
    const held = stages ? stagesWith(i, rankOf(device)) : [0];
    if (!held.length) device = EACH * stages.list[(stages.of[i] ?? [0])[0]].rank;
    paint();
  }
  function stored(i) {
    const n = nodes[i];
    const state = n.split.state ? [{ text: `how gradient and optimizer state of ${n.name} are stored`, split: splitBy(i), verb: "holds" }] : [];
    return [{ text: `how ${n.name} is stored`, split: splitBy(i, "state"), verb: "holds" }, ...state];
  }
  const NEAR = 12, listed = (all) => all.slice(0, NEAR).join(", ") + (all.length > NEAR ? ` and ${count(all.length - NEAR)} more` : "");
  const some = (all) => `${all.length > 1 ? "devices" : "device"} ${listed(all)}`;
  const stagesText = (rank) => { const all = stages.list.map((s, k) => [s, k]).filter(([s]) => s.rank === rank), blocks = sum(all.map(([s]) => s.blocks)); return `${all.length > 1 ? "stages" : "stage"} ${all.map(([, k]) => k).join(", ")}; ${blocks} ${blocks === 1 ? "block" : "blocks"}`; };
  /* The devices that the selected device sends to or shares a shard with: those at the same place in the ranks of neighbouring stages, or those of its own rank. */
  function partners(v, splits) {
    if (!v.sends) {
      const mine = splits[rankOf(device)] && shard(splits[rankOf(device)], place(device)).index, first = rankOf(device) * EACH, out = [];
      if (mine !== null) for (let d = first; d < first + EACH; d++) if (d !== device && shard(splits[rankOf(device)], place(d)).index === mine) out.push(d);
      return out;
    }
    const near = new Set();
    stages.list.forEach((s, k) => { if (s.rank === rankOf(device)) for (const t of [stages.list[k - 1], stages.list[k + 1]]) if (t && t.rank !== s.rank) near.add(t.rank); });
    return [...near].sort((a, b) => a - b).map((rank) => rank * EACH + (device % EACH));
  }
  /* Neighbouring shards differ in lightness, and eight hues divide all of them: hundreds of hues cannot be told apart. */
  const HUES = 8, SHADES = 8;
  function shade(index, ways, dark) {
    const each = Math.max(1, ways / HUES), hue = Math.floor(index / each), within = ways > HUES ? (index % each) / each : 0;
    const light = Math.floor(within * Math.min(SHADES, each)) * (22 / SHADES);
    return `hsl(${Math.round((330 * hue) / Math.min(ways, HUES))} 55% ${dark ? 24 + light : 86 - light}%)`;
  }
  /* A frame around the devices of each host. */
  function frames(c) {
    if (host < 2 || host >= D || COLUMNS % host || CELL < 6) return;
    c.strokeStyle = colour("soft"); c.lineWidth = 1;
    for (let d = 0; d < D; d += host) {
      const k = d % EACH;
      c.strokeRect((k % COLUMNS) * CELL - 0.5, bandTop(rankOf(d)) + Math.floor(k / COLUMNS) * CELL - 0.5, host * CELL - 2, CELL - 0.5);
    }
  }
  function paint() {
    const v = views[Number(view.value)];
    if (!v) return;
    const width = map.clientWidth - 30, least = D > 4096 ? 4 : D > 1024 ? 6 : D > 256 ? 14 : 30;
    COLUMNS = Math.max(1, Math.min(EACH, Math.floor(width / least)));
    if (host > 1 && COLUMNS > host) COLUMNS -= COLUMNS % host;
    if (D <= 4 * COLUMNS && EACH > host && host > 1) COLUMNS = Math.min(COLUMNS, Math.max(host, Math.ceil(EACH / 4 / host) * host));
    CELL = Math.min(stages ? 30 : 54, Math.floor(width / COLUMNS));
    ROWS = Math.ceil(EACH / COLUMNS);
    const splits = Array.from({ length: RANKS }, (_, rank) => v.split(rank)), dark = Number(colour("bg").match(/\d+/)[0]) < 128;
    const others = partners(v, splits), marked = new Set([device, ...others]), mark = colour(v.axes || v.sends ? "communication" : "accent"), line = colour("line"), ink = colour("ink");
    fitted(canvas, bandTop(RANKS - 1) + ROWS * CELL + 2, (c) => {
      for (let rank = 0; stages && rank < RANKS; rank++) {
        c.fillStyle = colour(splits[rank] ? "ink" : "soft");
        c.fillText(`rank ${rank}: ${stagesText(rank)}${splits[rank] ? "" : v.axes ? "; other split, or none of this" : "; has none of this"}`, 0, bandTop(rank) - HEAD / 2);
      }
      for (let d = 0; d < D; d++) {
        const rank = rankOf(d), k = d % EACH, x = (k % COLUMNS) * CELL, y = bandTop(rank) + Math.floor(k / COLUMNS) * CELL, s = splits[rank] && !v.sends ? shard(splits[rank], place(d)) : null;
        const gap = CELL > 12 ? 2 : CELL > 5 ? 1 : 0, wide = host > 1 && k % host === host - 1 && CELL > 5 ? 3 : gap;
        c.fillStyle = s && s.ways > 1 ? shade(s.index, s.ways, dark) : line;
        if (!splits[rank]) { c.strokeStyle = line; c.lineWidth = 1; if (CELL > 5) c.strokeRect(x + 0.5, y + 0.5, CELL - wide - 1, CELL - gap - 1); }
        else c.fillRect(x, y, CELL - wide, CELL - gap);
        if (marked.has(d) && splits[rank] && CELL > 5) { c.strokeStyle = mark; c.lineWidth = CELL > 12 ? 2.5 : 1; c.strokeRect(x + 1.5, y + 1.5, CELL - wide - 3, CELL - gap - 3); }
        else if (marked.has(d) && splits[rank]) { c.fillStyle = mark; c.fillRect(x, y, CELL, CELL); }
        if (d === device) { c.strokeStyle = ink; c.lineWidth = 3; c.strokeRect(x, y, Math.max(CELL - wide, 4), Math.max(CELL - gap, 4)); }
        if (CELL >= 30 || (stages && CELL >= 24 && D < 1000)) { c.fillStyle = ink; c.fillText(String(d), x + 4, y + CELL / 2); }
      }
      frames(c);
    });
    const at = place(device), mine = splits[rankOf(device)];
    const where = [stages ? `rank ${rankOf(device)}: ${stagesText(rankOf(device))}` : "", host > 1 && host < D ? `host ${Math.floor(device / host)}` : ""].filter(Boolean).join("; ");
    const who = `Device ${device}${where ? ` (${where})` : ""}, at ${located(at)}`;
    said.textContent = !mine ? `${who}: ${v.absent ?? "has none of this"}.`
      : v.sends ? `${who}: sends to and receives from ${some(others)}, at the same place in their ranks.`
      : v.axes ? `${who}: communicates with ${others.length ? some(others) : "no other device"} over ${together(v.axes)}.`
      : `${who}: ${v.verb} ${shard(mine, at).text}; ${others.length ? `the same as ${some(others)}` : `no other device${stages ? " of its rank" : ""} does`}.`;
    canvas.setAttribute("aria-label", `${count(D)} devices; arrow keys go from device to device. ${v.text}`);
  }
  view.addEventListener("change", paint);
  canvas.addEventListener("click", (e) => {
    const box = canvas.getBoundingClientRect(), column = Math.floor((e.clientX - box.left) / CELL), high = e.clientY - box.top;
    const rank = Math.min(RANKS - 1, Math.max(0, Math.floor((high - HEAD) / (bandTop(1) - bandTop(0) || Infinity))));
    const row = Math.floor((high - bandTop(rank)) / CELL), k = row * COLUMNS + column;
    if (row >= 0 && column < COLUMNS && k < EACH) { device = rank * EACH + k; paint(); }
  });
  canvas.addEventListener("keydown", (e) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: COLUMNS, ArrowUp: -COLUMNS }[e.key];
    if (by === undefined) return;
    e.preventDefault();
    if (device + by >= 0 && device + by < D) { device += by; paint(); }
  });
  onLook(paint, map);
  document.querySelectorAll("[data-node]").forEach((dot) => {
    const go = () => { reveal(Number(dot.dataset.node)); root.scrollIntoView(); };
    dot.addEventListener("click", go);
    dot.addEventListener("keydown", (e) => { if (e.key === "Enter") go(); });
  });
  const first = [...shown].sort((a, b) => total(b) - total(a))[0];
  if (first === undefined) draw();
  else { draw(); chosen = null; const find = (item) => item.children?.map((c) => (c.node === first ? c : find(c))).find(Boolean); const item = find(top); if (rows.includes(item)) { chosen = item; draw(); layer(first); tree.scrollTop = rows.indexOf(item) * 28 - tree.clientHeight / 2; } else group(rows[0].children ? rows[0] : { name: rows[0].name ?? "", children: [rows[0]] }); }
}
document.querySelectorAll("[data-explorer]").forEach(explorer);
