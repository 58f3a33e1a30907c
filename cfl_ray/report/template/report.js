"use strict";
(() => {
  // ---- tables: a click on a heading sorts by its column, another one turns the order round; empty cells stay last
  const key = (row, column) => row.cells[column].dataset.value;
  function sort(button) {
    const heading = button.closest("th"), column = heading.cellIndex, body = heading.closest("table").tBodies[0];
    const isNumber = heading.classList.contains("number");
    const before = heading.getAttribute("aria-sort");
    const descending = before === "none" ? isNumber : before === "ascending";
    for (const other of heading.parentNode.cells) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    const order = (a, b) => {
      const [x, y] = [key(a, column), key(b, column)];
      if (!isNumber) return sign * x.localeCompare(y);
      const [p, q] = [parseFloat(x), parseFloat(y)];
      return isNaN(p) || isNaN(q) ? isNaN(p) - isNaN(q) : sign * (p - q);
    };
    body.append(...[...body.rows].sort(order));
  }
  for (const button of document.querySelectorAll("table.sortable th button"))
    button.addEventListener("click", () => sort(button));

  // ---- figures: drawn when they come into view, all of them before printing
  const config = { responsive: true, displaylogo: false, displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const waiting = new Set(document.querySelectorAll(".plot"));
  function legendHeight(letters, width) {  // of a horizontal legend whose entries have so many letters, in pixels
    let rows = 1, used = 0;
    for (const count of letters) {
      const needed = 50 + 7.2 * count;
      if (used && used + needed > width - 72) { rows += 1; used = 0; }
      used += needed;
    }
    return letters.length ? 19.5 * rows + 12 : 0;
  }
  function draw(plot) {
    if (!waiting.delete(plot)) return;
    const { data, layout } = JSON.parse(document.getElementById(plot.id + "-data").textContent);
    const legend = legendHeight(plot.dataset.legend.split(" ").filter(Boolean).map(Number), plot.clientWidth);
    layout.height = +plot.dataset.height + legend;
    layout.legend = { orientation: "h", tracegroupgap: 0, x: 0, xanchor: "left", xref: "container", y: 0, yref: "container", yanchor: "bottom",
      maxheight: legend + 40 };
    layout.margin.b = legend + 44;
    Plotly.newPlot(plot, data, layout, config);
  }
  function start() {
    addEventListener("beforeprint", () => [...waiting].forEach(draw));
    const seen = new IntersectionObserver(entries => {
      for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
    }, { rootMargin: "400px" });
    waiting.forEach(plot => seen.observe(plot));
  }
  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    start();
  }
  load();
})();
