/* The timeline: streams as rows and what ran on them as boxes, with zoom and search. Each element with data-timeline names its data. */
function timeline(root, spec) {
  const ROW = 26, AXIS = 24, GAP = 2;
  const groups = spec.streams, longest = Math.max(...groups.map((s) => s.name.length));
  const left = () => (root.clientWidth < 600 ? Math.min(Math.max(74, 8 + 6.6 * longest), 130) : 130);
  let from = 0, to = spec.end, wanted = "", at = null; // at: [stream, index]
  const canvas = el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": `${spec.title}. Left and right arrows go from box to box, up and down change the stream, plus and minus zoom, 0 shows all.`,
  });
  const said = el("p", { class: "said", "aria-live": "polite" }, spec.hint);
  const search = el("input", { type: "search", placeholder: "Search names", "aria-label": `Search in ${spec.title}` });
  const found = el("span", { class: "soft", "aria-live": "polite" });
  const key = el("ul", { class: "key" }, ...spec.kinds.map((k) => el("li", {}, el("i", { class: `f-${k.colour}` }), k.name)));
  const press = (label, text, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
  const tools = el("div", { class: "tools" },
    press("Zoom in", "+", () => zoom(0.5)), press("Zoom out", "−", () => zoom(2)), press("Show all", "All", () => show(0, spec.end)),
    press("Earlier", "◀", () => pan(-0.3)), press("Later", "▶", () => pan(0.3)), search, found);
  root.replaceChildren(tools, canvas, key, said);
  const height = groups.length * ROW + AXIS;
  const matches = (label) => wanted && spec.labels[label].toLowerCase().includes(wanted);

  function draw() {
    const colours = spec.kinds.map((k) => colour(k.colour)), ink = colour("ink"), soft = colour("soft"), line = colour("line"), ours = colour("ours");
    fitted(canvas, height, (c, width) => {
      const x0 = left(), scale = (width - x0) / (to - from);
      for (const [row, s] of groups.entries()) {
        const y = row * ROW;
        c.strokeStyle = line;
        c.beginPath(); c.moveTo(0, y + ROW - 0.5); c.lineTo(width, y + ROW - 0.5); c.stroke();
        let last = -1;
        for (let i = first(s, from); i < s.start.length && s.start[i] < to; i++) {
          const a = x0 + Math.max(0, (s.start[i] - from) * scale), b = x0 + Math.min(width - x0, (s.start[i] + s.length[i] - from) * scale);
          const hit = matches(s.label[i]), chosen = at && at[0] === row && at[1] === i;
          if (b < last + 0.4 && !hit && !chosen) continue; // another box already covers this pixel
          last = b;
          c.globalAlpha = wanted && !hit ? 0.25 : 1;
          c.fillStyle = hit || chosen ? ours : colours[s.kind[i]];
          c.fillRect(a, y + GAP, Math.max(b - a - (b - a > 4 ? 0.6 : 0), 0.6), ROW - 2 * GAP - 1);
          if (b - a > spec.narrow) {
            c.save(); c.beginPath(); c.rect(a + 3, y, b - a - 6, ROW); c.clip();
            c.fillStyle = colour("bg"); c.fillText(spec.labels[s.label[i]], a + 4, y + ROW / 2); c.restore();
          }
          c.globalAlpha = 1;
        }
        c.fillStyle = colour("bg"); c.fillRect(0, y, x0 - 2, ROW - 1);
        c.save(); c.beginPath(); c.rect(0, y, x0 - 6, ROW); c.clip();
        c.fillStyle = ink; c.fillText(s.name, 4, y + ROW / 2); c.restore();
      }
      /* Ticks at round times: 1, 2 or 5 times a power of ten. */
      const least = ((to - from) * 90) / (width - x0), power = 10 ** Math.floor(Math.log10(least));
      const each = power * [1, 2, 5, 10].find((m) => power * m >= least);
      c.fillStyle = soft;
      for (let t = Math.ceil(from / each) * each; t <= to; t += each) {
        const x = x0 + ((width - x0) * (t - from)) / (to - from), text = seconds(t / 1e9);
        if (x + c.measureText(text).width < width) c.fillText(text, x, height - AXIS / 2);
      }
    });
  }
  /* The first box of a stream that ends after a time, by binary search: the boxes of a stream do not overlap. */
  function first(s, time) {
    let low = 0, high = s.start.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (s.start[mid] + s.length[mid] <= time) low = mid + 1; else high = mid;
    }
    return low;
  }
  function show(a, b) {
    const wide = Math.min(Math.max(b - a, 10), spec.end);
    from = Math.min(Math.max(a, 0), spec.end - wide);
    to = from + wide;
    draw();
  }
  function zoom(by, around = (from + to) / 2) { show(around - (around - from) * by, around + (to - around) * by); }
  function pan(by) { show(from + (to - from) * by, to + (to - from) * by); }
  function choose(row, i) {
    at = [row, i];
    const s = groups[row], a = s.start[i], b = a + s.length[i];
    if (a < from || b > to) show(a - (to - from) / 2, a + (to - from) / 2);
    said.textContent = `${spec.labels[s.label[i]]}: ${spec.kinds[s.kind[i]].name} on ${s.name}, from ${seconds(a / 1e9)} for ${seconds(s.length[i] / 1e9)}` + (s.more ? `. ${spec.more[s.more[i]]}` : "");
    draw();
  }
  function under(event) {
    const box = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - box.top) / ROW), x0 = left();
    const time = from + ((event.clientX - box.left - x0) * (to - from)) / (box.width - x0);
    if (!groups[row]) return { time };
    const i = first(groups[row], time);
    return { time, row, i: i < groups[row].start.length && groups[row].start[i] <= time ? i : null };
  }
  const fingers = new Map();
  let moved = false, apart = 0;
  const spread = () => { const [a, b] = [...fingers.values()]; return Math.abs(a.clientX - b.clientX); };
  canvas.addEventListener("pointerdown", (e) => { fingers.set(e.pointerId, e); moved = false; if (fingers.size === 2) apart = spread(); canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    const before = fingers.get(e.pointerId);
    if (!before) { canvas.title = ""; return; }
    const dx = e.clientX - before.clientX;
    if (Math.abs(dx) < 3 && fingers.size === 1) return;
    fingers.set(e.pointerId, e); moved = true;
    if (fingers.size === 1) pan(-dx / (canvas.clientWidth - left()));
    else { const now = spread(); if (now > 5 && apart > 5) zoom(apart / now, under(e).time); apart = now; }
  });
  const lift = (e) => { fingers.delete(e.pointerId); };
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerup", (e) => { lift(e); const u = under(e); if (!moved && u.i !== null && u.i !== undefined) choose(u.row, u.i); });
  canvas.addEventListener("wheel", (e) => { if (!(e.ctrlKey || e.metaKey)) return; e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, under(e).time); }, { passive: false });
  canvas.addEventListener("keydown", (e) => {
    const [row, i] = at ?? [0, -1];
    const acts = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, spec.end),
      ArrowRight: () => { if (i + 1 < groups[row].start.length) choose(row, i + 1); },
      ArrowLeft: () => { if (i > 0) choose(row, i - 1); },
      ArrowDown: () => step(1), ArrowUp: () => step(-1),
    };
    if (acts[e.key] && !e.ctrlKey && !e.metaKey) { e.preventDefault(); acts[e.key](); }
  });
  function step(by) {
    const [row, i] = at ?? [0, 0];
    for (let r = row + by; groups[r]; r += by)
      if (groups[r].start.length) return choose(r, Math.min(first(groups[r], groups[row].start[i]), groups[r].start.length - 1));
  }
  search.addEventListener("input", () => {
    wanted = search.value.trim().toLowerCase();
    const n = wanted ? groups.reduce((sum, s) => sum + s.label.filter(matches).length, 0) : 0;
    found.textContent = wanted ? `${count(n)} found; Enter goes to the next` : "";
    draw();
  });
  search.addEventListener("keydown", (e) => {
    if (e.key !== "Enter" || !wanted) return;
    const all = groups.flatMap((s, row) => s.start.flatMap((t, i) => (matches(s.label[i]) ? [[t, row, i]] : []))).sort((a, b) => a[0] - b[0]);
    if (!all.length) return;
    const now = at ? groups[at[0]].start[at[1]] : -1;
    const next = all.find(([t, row, i]) => t > now || (t === now && at && row > at[0])) ?? all[0];
    choose(next[1], next[2]);
  });
  onLook(draw, canvas);
}
document.querySelectorAll("[data-timeline]").forEach((root) => timeline(root, data.timelines[root.dataset.timeline]));
