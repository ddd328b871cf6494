// Tables that sort and can be searched, boxes that scroll by keyboard, headings that stay where a link led. Every page is
// whole without it.
(() => {
  const number = text => {
    const plain = { inf: Infinity, "-inf": -Infinity, NaN: NaN, nan: NaN }[text];
    return plain === undefined ? parseFloat(text) : plain;
  };

  const sortable = table => {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const numeric = head.classList.contains("number");
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const keyed = [...body.rows].map(row => {
          const text = row.cells[column].textContent.trim();
          return [row, numeric ? number(text) : text];
        });
        const last = value => value === "" || value !== value; // empty cells and NaN stay at the end, either way
        keyed.sort(([, a], [, b]) => {
          if (last(a) || last(b)) return last(a) - last(b);
          const order = numeric ? (a < b ? -1 : a > b ? 1 : 0) : a.localeCompare(b, "en", { numeric: true });
          return down ? -order : order;
        });
        body.append(...keyed.map(([row]) => row));
      });
    });
  };

  const searchable = table => {
    const rows = [...table.tBodies[0].rows].map(row => [row, row.textContent.toLowerCase()]);
    if (rows.length < 30) return;
    const label = document.createElement("label");
    label.className = "rows";
    label.innerHTML = 'show rows with <input type="search" spellcheck="false"> <output></output>';
    const [field, count] = [label.querySelector("input"), label.querySelector("output")];
    const show = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      for (const [row, text] of rows) {
        row.hidden = !words.every(word => text.includes(word));
        left += !row.hidden;
      }
      count.textContent = left === rows.length ? `${left} rows` : `${left} of ${rows.length} rows`;
    };
    field.addEventListener("input", show);
    show();
    table.closest(".scrolls").before(label);
  };

  const BOXES = ".table-wrapper, .scrolls, .output, .katex-display, pre";
  const reachable = () => {
    for (const box of document.querySelectorAll(BOXES)) {
      const scrolls = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
      if (scrolls && /auto|scroll/.test(getComputedStyle(box).overflowX)) {
        box.tabIndex = 0;
      } else if (box.tabIndex === 0) {
        box.removeAttribute("tabindex");
      }
    }
  };

  // A panel grows when it comes near the window and its controls appear: what lies below moves while the page is still on
  // its way to it. What the address names is put back into its place until the reader scrolls or touches anything.
  let held = null;
  const panel = () => {
    const name = new URLSearchParams(location.hash.slice(1)).get("panel"); // as player.js writes it
    return name && document.querySelector(`.flakit-player[data-frames="${CSS.escape(name)}"]`);
  };
  const hold = () => {
    held = document.querySelector(":target") ?? panel();
    place();
  };
  const place = () => held?.scrollIntoView({behavior: "instant", block: "start"});
  const holding = () => {
    addEventListener("hashchange", hold);
    addEventListener("load", hold);
    // The same link once more changes no address.
    document.addEventListener("click", event => { if (event.target.closest?.('a[href^="#"]')) setTimeout(hold); });
    for (const moved of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      addEventListener(moved, () => { held = null; }, {capture: true, passive: true});
    }
    addEventListener("scrollend", place);
    new ResizeObserver(place).observe(document.querySelector("article") ?? document.body);
    hold();
  };

  /** The sentence around the words that were searched, below each page that was found. */
  const quoting = () => {
    const results = document.querySelector("#search-results");
    const words = new URLSearchParams(location.search).get("q")?.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
    if (!results || !words.length) return;
    const quote = item => {
      const address = item.querySelector("a")?.getAttribute("href")?.replace(/[?#].*$/, "").replace(/^\.\//, "");
      const text = window.flakitTexts[address], at = text?.toLowerCase() ?? "";
      const found = words.map(word => at.indexOf(word)).filter(place => place >= 0);
      if (!found.length || item.querySelector(".context")) return;
      const from = Math.max(0, at.lastIndexOf(" ", Math.min(...found) - 60)), to = at.indexOf(" ", from + 200);
      const context = document.createElement("p");
      context.className = "context";
      const parts = text.slice(from, to < 0 ? undefined : to).split(new RegExp(`(${words.join("|")})`, "giu"));
      context.append(from ? "… " : "", ...parts.map((part, n) => {
        if (n % 2 === 0) return part;
        const mark = document.createElement("mark");
        mark.textContent = part;
        return mark;
      }), to < 0 ? "" : " …");
      item.append(context);
    };
    const script = document.createElement("script");
    script.src = `${document.documentElement.dataset.content_root}_static/excerpts.js`;
    script.addEventListener("load", () => {
      const all = () => results.querySelectorAll("ul.search > li").forEach(quote);
      new MutationObserver(all).observe(results, {childList: true, subtree: true});
      all();
    });
    document.head.append(script);
  };

  document.addEventListener("DOMContentLoaded", () => {
    holding();
    quoting();
    document.querySelectorAll("table.sortable").forEach(table => { sortable(table); searchable(table); });
    const chinese = document.documentElement.lang === "zh";
    const label = (selector, words) =>
      document.querySelectorAll(selector).forEach(each => each.setAttribute("aria-label", words));
    label(".sidebar-drawer", chinese ? "所有页面" : "all pages");
    label(".toc-drawer", chinese ? "本页内容" : "on this page");
    if (chinese) {
      label("#__navigation", "打开或收起所有页面");
      label("#__toc", "打开或收起本页内容");
      label(".theme-toggle", "切换浅色、深色或自动");
    }
    reachable();
  });
  addEventListener("load", reachable);
  addEventListener("resize", reachable);
  document.addEventListener("toggle", reachable, true);
})();
