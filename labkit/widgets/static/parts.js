// The small parts of labkit's panel: text, knobs, tables and charts. All text goes in as textContent, never as HTML.

function node(tag, className, text, attributes = {}) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined && text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function button(text, name, onClick, className = "") {
  const made = node("button", `lk-button ${className}`, text, { type: "button", "aria-label": name });
  made.addEventListener("click", onClick);
  return made;
}

function send(model, name, value) {
  model.set(name, value);
  model.save_changes();
}

// A counter makes each press a change, so that two equal presses both arrive.
function press(model, what) {
  send(model, "pressed", { what, count: (model.get("pressed").count || 0) + 1 });
}

let lastId = 0;
const newId = (what) => `lk-${what}-${++lastId}`;

/* screen: tells Python the theme and the width of the page */

function isDark() {
  const body = document.body;
  if (body.dataset.jpThemeLight !== undefined) return body.dataset.jpThemeLight === "false";
  if (body.dataset.vscodeThemeKind !== undefined) return body.dataset.vscodeThemeKind.includes("dark");
  const theme = document.documentElement.dataset.theme;
  if (theme) return theme === "dark";
  return window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function renderScreen({ model, el }) {
  el.classList.add("lk-screen");
  const look = () => {
    const theme = isDark() ? "dark" : "light";
    if (theme !== model.get("theme")) send(model, "theme", theme);
    const panel = el.closest(".lk-panel");
    if (panel) panel.dataset.theme = theme;
  };
  const measure = () => {
    const panel = el.closest(".lk-panel");
    const narrow = !!panel && panel.clientWidth > 0 && panel.clientWidth < 760;
    if (narrow !== model.get("narrow")) send(model, "narrow", narrow);
  };
  const themes = new MutationObserver(look);
  const filter = { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind", "data-theme"] };
  themes.observe(document.body, filter);
  themes.observe(document.documentElement, filter);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", look);
  const sizes = new ResizeObserver(() => { measure(); look(); });
  const attach = () => {
    const panel = el.closest(".lk-panel");
    if (panel) sizes.observe(panel); else requestAnimationFrame(attach);
  };
  attach();
  look();
  return () => { themes.disconnect(); sizes.disconnect(); scheme.removeEventListener("change", look); };
}

/* text: one line or paragraph with a level, optional folded details and buttons */

function renderText({ model, el }) {
  el.classList.add("lk-text");
  const role = model.get("role");
  if (role) el.setAttribute("role", role);
  const draw = () => {
    el.dataset.level = model.get("level");
    el.hidden = !model.get("text");
    const open = el.querySelector("details")?.open;
    el.replaceChildren();
    if (model.get("heading")) el.append(node("strong", "lk-heading", model.get("heading")), " ");
    el.append(node("span", "lk-words", model.get("text")));
    const share = model.get("progress");
    if (share !== null) {
      el.append(node("progress", "lk-progress", null, { max: 1, value: share, "aria-label": "progress of the run" }));
    }
    for (const name of model.get("buttons")) {
      el.append(button(name, name, () => press(model, name), "lk-small"));
    }
    const copied = model.get("copy");
    if (copied) {
      const copy = button("Copy", "copy to the clipboard", async () => {
        await navigator.clipboard.writeText(copied);
        copy.textContent = "Copied";
      }, "lk-small");
      el.append(copy);
    }
    if (model.get("details")) {
      const wasOpen = open && el.dataset.summary === model.get("summary");
      el.dataset.summary = model.get("summary");
      const folded = node("details", "lk-details");
      folded.append(node("summary", "", model.get("summary")), node("pre", "", model.get("details")));
      folded.open = wasOpen || !model.get("folded");
      el.append(folded);
    }
  };
  model.on("change", draw);
  draw();
  return () => model.off("change", draw);
}

/* knob: label, typed box or list, a step down and up with what each buys, default, error, help */

function renderKnob({ model, el }) {
  el.classList.add("lk-knob");
  const id = newId("knob");
  const unit = model.get("unit");
  const head = node("div", "lk-knob-head");
  head.append(node("label", "lk-knob-name", model.get("name"), { for: id }));
  if (unit) head.append(node("span", "lk-muted", unit));
  const help = button("?", `what ${model.get("name")} means`, () => {
    text.hidden = !text.hidden;
    help.setAttribute("aria-expanded", String(!text.hidden));
  }, "lk-help");
  help.setAttribute("aria-expanded", "false");
  const note = node("span", "lk-muted lk-knob-default");
  head.append(help, note);

  const choices = model.get("choices");
  let input;
  if (choices.length) {
    input = node("select", "lk-input", null, { id });
    for (const choice of choices) input.append(node("option", "", choice, { value: choice }));
  } else {
    input = node("input", "lk-input", null, { id, type: "text", inputmode: "decimal", autocomplete: "off" });
  }
  input.setAttribute("aria-label", unit ? `${model.get("name")} in ${unit}` : model.get("name"));
  input.setAttribute("aria-describedby", `${id}-note`);
  input.addEventListener("change", () => send(model, "typed", { text: input.value, count: (model.get("typed").count || 0) + 1 }));
  input.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "ArrowUp" && !choices.length) { press(model, "up"); event.preventDefault(); }
    if (event.key === "ArrowDown" && !choices.length) { press(model, "down"); event.preventDefault(); }
  });
  const down = button("−", `${model.get("name")}: a step down`, () => press(model, "down"));
  const up = button("+", `${model.get("name")}: a step up`, () => press(model, "up"));
  const row = node("div", "lk-knob-row");
  row.append(down, input, up);

  const gains = node("div", "lk-knob-gains lk-muted", "", { id: `${id}-note` });
  const error = node("div", "lk-knob-error", "", { role: "alert" });
  const text = node("div", "lk-knob-help");
  text.hidden = true;
  el.append(head, row, gains, error, text);

  const draw = () => {
    note.textContent = model.get("default_text");
    gains.replaceChildren(...model.get("gains").map((line) => node("div", "", line)));
    error.textContent = model.get("error");
    input.setAttribute("aria-invalid", String(!!model.get("error")));
    el.dataset.changed = String(model.get("changed"));
    text.replaceChildren(...model.get("help").map((line) => node("p", "", line)));
    down.disabled = !model.get("can_step").down;
    up.disabled = !model.get("can_step").up;
  };
  // A refused text stays in the box beside its error: typed again as it was, the value would be no change to the browser.
  const put = () => { input.value = model.get("shown"); };
  const accepted = () => { if (!model.get("error")) put(); };
  model.on("change", draw);
  model.on("change:shown", put);
  model.on("change:error", accepted);
  put();
  draw();
  return () => { model.off("change", draw); model.off("change:shown", put); model.off("change:error", accepted); };
}

/* table: a real table; rows can be chosen by click or by arrow keys */

function renderTable({ model, el }) {
  el.classList.add("lk-table");
  let sort = { column: -1, rising: true };
  let hadFocus = false;

  const order = () => {
    const rows = model.get("rows").map((cells, index) => ({ cells, index }));
    const keys = model.get("sort_keys");
    const pinned = model.get("pinned");
    const place = (row) => (pinned.includes(row.index) ? pinned.indexOf(row.index) : pinned.length);
    const key = (row) => (keys[row.index] ? keys[row.index][sort.column] : row.cells[sort.column]);
    rows.sort((a, b) => {
      if (place(a) !== place(b)) return place(a) - place(b);
      if (sort.column < 0) return a.index - b.index;
      const [x, y] = [key(a), key(b)];
      const compared = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return sort.rising ? compared : -compared;
    });
    return rows;
  };

  const head = () => {
    const line = node("tr");
    model.get("columns").forEach((title, column) => {
      const cell = node("th", "", null, { scope: "col" });
      const state = sort.column === column ? (sort.rising ? "ascending" : "descending") : "none";
      if (model.get("selectable")) {
        cell.setAttribute("aria-sort", state);
        const arrow = { none: "", ascending: " ▲", descending: " ▼" }[state];
        cell.append(button(title + arrow, `sort by ${title}`, () => {
          sort = { column, rising: sort.column === column ? !sort.rising : true };
          draw();
        }, "lk-sort"));
      } else cell.textContent = title;
      line.append(cell);
    });
    const made = node("thead");
    made.append(line);
    return made;
  };

  const choose = (index) => { hadFocus = true; send(model, "selected", index); };
  const move = (event, position, rows) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step !== undefined) {
      const next = rows[Math.min(rows.length - 1, Math.max(0, position + step))];
      choose(next.index);
    } else if (event.key === "Enter" || event.key === " ") choose(rows[position].index);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const body = () => {
    const made = node("tbody");
    const rows = order();
    const selectable = model.get("selectable");
    const selected = model.get("selected");
    rows.forEach(({ cells, index }, position) => {
      const line = node("tr");
      if (selectable) {
        line.setAttribute("aria-selected", String(index === selected));
        line.tabIndex = index === selected || (position === 0 && !rows.some((row) => row.index === selected)) ? 0 : -1;
        line.addEventListener("click", () => choose(index));
        line.addEventListener("keydown", (event) => move(event, position, rows));
      }
      if (model.get("pinned").includes(index)) line.classList.add("lk-pinned");
      cells.forEach((cell, column) => {
        // A change against the baseline stands under its number.
        const [value, change] = selectable && column ? cell.split(/ (?=\()/) : [cell];
        const made = column === 0 ? node("th", "", cell, { scope: "row", title: cell }) : node("td", "", value);
        if (change) made.append(" ", node("span", "lk-delta", change));
        const mark = column === 0 ? model.get("marks")[index] : "";
        if (mark) made.append(node("span", "lk-mark", ` ${mark}`));
        line.append(made);
      });
      made.append(line);
    });
    return made;
  };

  // The chosen row inside the table's own box; the page stays where it is.
  let inView = -1;
  const bringIntoView = (scroll) => {
    const row = scroll.querySelector('tr[aria-selected="true"]')?.getBoundingClientRect();
    if (!row) return;
    const box = scroll.getBoundingClientRect();
    const top = box.top + scroll.querySelector("thead").offsetHeight;
    if (row.top < top) scroll.scrollTop -= top - row.top;
    else if (row.bottom > box.bottom) scroll.scrollTop += row.bottom - box.bottom;
  };

  const draw = () => {
    el.hidden = false;
    if (!model.get("rows").length) {
      el.replaceChildren(node("p", "lk-muted", model.get("empty_text")));
      el.hidden = !model.get("empty_text");
      return;
    }
    const table = node("table");
    if (model.get("caption")) table.append(node("caption", "", model.get("caption")));
    table.append(head(), body());
    const before = el.querySelector(".lk-scroll")?.scrollTop || 0;
    const scroll = node("div", "lk-scroll");
    scroll.append(table);
    if (model.get("folded")) {
      const open = el.querySelector("details")?.open || false;
      const folded = node("details");
      folded.open = open;
      folded.append(node("summary", "", model.get("folded")), scroll);
      el.replaceChildren(folded);
    } else el.replaceChildren(scroll);
    scroll.scrollTop = before;
    if (model.get("selected") !== inView) bringIntoView(scroll);
    inView = model.get("selected");
    if (hadFocus) el.querySelector('tr[aria-selected="true"]')?.focus({ preventScroll: true });
    hadFocus = false;
  };
  model.on("change", draw);
  draw();
  return () => model.off("change", draw);
}

/* chart: a plotly figure from its full description, so that a reloaded page shows what was last drawn */

function plotlyLoaded() {
  if (!globalThis.labkitPlotly) {
    const entry = {};
    entry.promise = new Promise((resolve) => { entry.resolve = resolve; });
    globalThis.labkitPlotly = entry;
  }
  return globalThis.labkitPlotly.promise;
}

function renderChart({ model, el }) {
  el.classList.add("lk-chart");
  const plot = node("div", "lk-plot", null, { role: "img" });
  const waiting = node("p", "lk-muted", "loading the drawing library …");
  el.append(waiting, plot);
  let closed = false;
  let drawing = Promise.resolve();
  let newest = 0;
  const config = {
    displaylogo: false,
    responsive: false,
    // A closed list: plotly.js adds "Share chart…", which would send the data to its maker's server.
    modeBarButtons: [["toImage", "resetScale2d"]],
  };
  const draw = () => {
    plot.setAttribute("aria-label", model.get("description"));
    if (!model.get("figure").layout) return;
    const mine = ++newest;
    drawing = drawing.then(async () => {
      const plotly = await plotlyLoaded();
      // While the library loads or a slow page draws, only the last of the waiting figures is worth drawing.
      if (closed || mine !== newest) return;
      // plotly writes into what it is given, so it gets a copy.
      const figure = JSON.parse(JSON.stringify(model.get("figure")));
      waiting.remove();
      figure.layout.autosize = true;
      plot.style.height = `${figure.layout.height || 340}px`;
      await plotly.react(plot, figure.data, figure.layout, { ...config, displayModeBar: figure.data.length > 0 });
      for (const named of plot.querySelectorAll(".modebar-btn")) {
        named.setAttribute("aria-label", named.dataset.title || "chart tool");
      }
      if (!plot.dataset.clicks) {
        plot.dataset.clicks = "on";
        plot.on("plotly_click", (event) => {
          const id = event.points[0]?.customdata;
          if (typeof id === "string") send(model, "clicked", { run_id: id, count: (model.get("clicked").count || 0) + 1 });
        });
      }
    }).catch((error) => console.error("labkit chart:", error));
  };
  let width = 0;
  const sizes = new ResizeObserver(async () => {
    if (Math.abs(el.clientWidth - width) < 2 || !el.clientWidth) return;
    width = el.clientWidth;
    const plotly = await plotlyLoaded();
    if (!closed && plot.dataset.clicks) plotly.Plots.resize(plot);
  });
  sizes.observe(el);
  model.on("change:figure", draw);
  draw();
  return () => {
    closed = true;
    sizes.disconnect();
    model.off("change:figure", draw);
    if (plot.dataset.clicks) plotlyLoaded().then((plotly) => plotly.purge(plot));
  };
}

const renderers = { screen: renderScreen, text: renderText, knob: renderKnob, table: renderTable, chart: renderChart };

export default {
  render(context) {
    return renderers[context.model.get("kind")](context);
  },
};
