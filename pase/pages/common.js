"use strict";
/* Helpers for all widgets. Text from the data goes into the page as text, never as markup. */
const data = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

function cost(value) {
  if (data.unit !== "s") return `${value.toPrecision(4)} ${data.unit}`;
  return seconds(value);
}

function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const [scale, name] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((value * scale).toPrecision(3))} ${name}`;
}

function bytes(value) {
  let n = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(n) < 1024) return `${Number(n.toPrecision(3))} ${unit}`;
    n /= 1024;
  }
  return `${Number(n.toPrecision(3))} TiB`;
}

const count = (n) => n.toLocaleString("en");

/* The colour of the style sheet with this name, for canvases. A hidden element resolves light and dark. */
const probe = el("span", { hidden: true });
document.body.append(probe);
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const redraws = [];
const redraw = () => redraws.forEach((draw) => draw());
function onLook(draw, element) {
  redraws.push(draw);
  new ResizeObserver(draw).observe(element);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

const theme = document.getElementById("theme");
theme.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  theme.textContent = dark ? "Dark" : "Light";
  redraw();
});
theme.textContent = matchMedia("(prefers-color-scheme: dark)").matches ? "Light" : "Dark";

/* Fit a canvas to its box, sharp on high-resolution screens; draw(context, width, height) is in CSS pixels. */
function fitted(canvas, height, draw) {
  const width = canvas.clientWidth;
  if (!width) return;
  const fine = devicePixelRatio || 1;
  canvas.width = Math.round(width * fine);
  canvas.height = Math.round(height * fine);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(fine, 0, 0, fine, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  draw(context, width, height);
}

/* Mark the section that is being read in the list of sections. */
const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
const reading = new IntersectionObserver(
  (seen) => {
    const entered = seen.find((entry) => entry.isIntersecting);
    if (!entered) return;
    links.forEach((a) => a.removeAttribute("aria-current"));
    links.get(entered.target.id)?.setAttribute("aria-current", "true");
  },
  { rootMargin: "-20% 0px -70% 0px" },
);
document.querySelectorAll("main > section").forEach((section) => reading.observe(section));
