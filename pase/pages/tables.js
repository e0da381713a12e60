/* Tables to search and to sort: a box above the table, and a button in the title of each column. */
document.querySelectorAll("[data-searched]").forEach((region) => {
  const table = region.querySelector("table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const said = el("span", { class: "soft", role: "status", "aria-label": "Rows found" });
  const text = (row) => row.textContent.toLowerCase();
  const texts = new Map(rows.map((row) => [row, text(row)]));

  function search(box) {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => texts.get(row).includes(word));
      shown += row.hidden ? 0 : 1;
    }
    said.textContent = words.length ? `${count(shown)} of ${count(rows.length)}` : "";
  }

  const box = el("input", { type: "search", placeholder: "Search", oninput: (e) => search(e.target) });
  region.before(el("div", { class: "tools" }, el("label", {}, `Search in: ${region.getAttribute("aria-label")}`, box), said));

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const numbers = head.classList.contains("n");
    if (!head.textContent.trim() || head.classList.contains("b")) return;
    const value = (row) => (numbers ? parseFloat(row.cells[column].textContent) : row.cells[column].textContent);
    const button = el("button", { type: "button", class: "sort" }, ...head.childNodes);
    let down = !numbers;
    button.addEventListener("click", () => {
      down = !down;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      /* Rows without a number stay at the end in either order. */
      const compare = (a, b) => (numbers
        ? (isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) : sign * (a - b))
        : sign * a.localeCompare(b, "en", { numeric: true }));
      rows.sort((a, b) => compare(value(a), value(b)));
      body.append(...rows);
    });
    head.append(button);
  });
});
