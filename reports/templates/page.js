(() => {
  const root = document.documentElement;
  // A browser may refuse storage to a local file; the theme is then that of this visit.
  const stored = (work) => { try { return work(localStorage); } catch { return null; } };
  const show = (theme) => { if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme; };
  for (const input of document.querySelectorAll("input[name=theme]")) {
    if (input.value === stored((storage) => storage.getItem("mesa-tune-theme"))) {
      input.checked = true;
      show(input.value);
    }
    input.addEventListener("change", () => {
      show(input.value);
      stored((storage) => storage.setItem("mesa-tune-theme", input.value));
    });
  }

  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  const value = (row, column, number) => {
    const cell = row.cells[column];
    if (!number) return cell.textContent;
    const found = parseFloat(cell.dataset.value);
    return Number.isNaN(found) ? -1 : found;
  };
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const number = "number" in head.dataset;
      const down = head.getAttribute("aria-sort") === (number ? "descending" : "ascending");
      const sign = (number ? -1 : 1) * (down ? -1 : 1);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const order = (a, b) => number ? a - b : a.localeCompare(b, "en", { numeric: true });
      body.append(...[...body.rows].sort((a, b) => sign * order(value(a, column, number), value(b, column, number))));
    }));
  }

  const filter = document.getElementById("filter");
  filter?.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase(), rows = [...document.querySelector("#layers tbody").rows];
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    const left = rows.filter((row) => !row.hidden).length;
    document.getElementById("shown").textContent = `${left} of ${rows.length} rows`;
  });
})();
