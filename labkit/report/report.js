"use strict";
(function () {
  var PRINT_WIDTH = 680; // A4 less margins at 96 dpi; charts keep their screen width otherwise (plotly.js#1275)
  var NARROW = 560;
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var printing = false;
  var opened = [];

  function read(id) {
    return JSON.parse(document.getElementById(id).textContent);
  }

  function axes(layout) {
    var found = [];
    Object.keys(layout).forEach(function (key) {
      if (/^xaxis\d*$/.test(key)) {
        var y = key.replace("x", "y");
        if (layout[y] && layout[key].domain) {
          found.push({ x: layout[key], y: layout[y], start: layout[key].domain[0], middle: (layout[key].domain[0] + layout[key].domain[1]) / 2 });
        }
      }
    });
    return found.sort(function (a, b) { return a.start - b.start; });
  }

  // Plots side by side become plots one above the other, so that a phone can show them.
  function stack(layout, named) {
    var plots = axes(layout);
    var starts = new Set(plots.map(function (plot) { return plot.start; }));
    if (plots.length < 2 || starts.size !== plots.length) { return layout; }
    var height = Math.max(210, (layout.height || 340) * 0.8) * plots.length;
    var gap = 96 / height; // room for the title below one plot and the title over the next
    var size = (1 - gap * (plots.length - 1)) / plots.length;
    var titles = plots.map(function (plot) {
      return (layout.annotations || []).filter(function (note) {
        return note.xref === "paper" && Math.abs(note.x - plot.middle) < 0.01;
      });
    });
    plots.forEach(function (plot, index) {
      var top = 1 - index * (size + gap);
      titles[index].forEach(function (note) {
        note.x = 0.5;
        note.y = top;
      });
      // Over the same names only the lowest plot shows them: there is no room between two.
      if (named && index < plots.length - 1) { Object.assign(plot.x, { showticklabels: false, title: { text: "" } }); }
      if (plot.y.ticktext) { plot.y.showticklabels = true; }
      plot.x.domain = [0, 1];
      plot.y.domain = [Math.max(0, top - size), top];
    });
    layout.height = height;
    return layout;
  }

  function wrap(text) {
    var lines = [""];
    text.split(" ").forEach(function (word) {
      var last = lines.length - 1;
      if (lines[last] && lines[last].length + word.length > 38) { lines.push(word); } else { lines[last] += (lines[last] && " ") + word; }
    });
    return lines.join("<br>");
  }

  // On a phone: plots stacked, long axis titles in lines, the legend in a column below everything.
  function narrow(figure) {
    var named = axes(figure.layout).every(function (plot) { return plot.x.type === "category" || plot.x.ticktext; });
    var layout = stack(figure.layout, named);
    axes(layout).forEach(function (plot) {
      if (plot.x.title && plot.x.title.text) { plot.x.title.text = wrap(plot.x.title.text); }
    });
    var entries = figure.data.filter(function (trace) { return trace.showlegend !== false; }).length;
    if (layout.showlegend === false || figure.data.length < 2) { return; }
    layout.height = (layout.height || 340) + 20 * entries;
    layout.margin = Object.assign({ l: 56, r: 16, b: 44 }, layout.margin, { t: 30 });
    layout.margin.b += 20 * entries + 20;
    layout.legend = Object.assign({}, layout.legend, {
      orientation: "v", x: 0, xanchor: "left", xref: "paper", y: 0, yref: "container", yanchor: "bottom"
    });
  }

  function draw(element) {
    var name = element.getAttribute("data-plot");
    var figure = read((dark.matches && !printing ? "dark-" : "light-") + name);
    var width = printing ? PRINT_WIDTH : element.clientWidth;
    figure.layout.width = width;
    if (width < NARROW) { narrow(figure); }
    element.style.minHeight = (figure.layout.height || 340) + "px";
    return window.Plotly.react(element, figure.data, figure.layout, {
      displaylogo: false,
      responsive: false,
      modeBarButtons: [["toImage", "resetScale2d"]]
    }).then(function () {
      element.querySelectorAll(".modebar-btn").forEach(function (button) {
        button.setAttribute("aria-label", button.getAttribute("data-title") || "");
      });
      element.setAttribute("data-drawn", "true");
    });
  }

  function drawAll() {
    document.querySelectorAll(".plot").forEach(draw);
  }

  function beforePrint() {
    if (printing) { return; }
    printing = true;
    opened = Array.from(document.querySelectorAll("details:not([open])"));
    opened.forEach(function (element) { element.open = true; });
    drawAll();
  }

  function afterPrint() {
    if (!printing) { return; }
    printing = false;
    opened.forEach(function (element) { element.open = false; });
    drawAll();
  }

  function copy(button) {
    var source = document.getElementById(button.getAttribute("data-copy"));
    var status = document.getElementById("copy-status");
    function done() { status.textContent = "Copied"; }
    function select() {
      var range = document.createRange();
      range.selectNodeContents(source);
      var selection = window.getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      status.textContent = "Selected: copy it with Ctrl+C";
    }
    if (navigator.clipboard) {
      navigator.clipboard.writeText(source.textContent).then(done, select);
    } else {
      select();
    }
  }

  document.querySelectorAll("button.copy").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () { copy(button); });
  });
  document.querySelectorAll("button.print").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      beforePrint();
      // Printing a tick later: the charts must have their new width first.
      window.setTimeout(function () { window.print(); afterPrint(); }, 50);
    });
  });
  window.addEventListener("beforeprint", beforePrint);
  window.addEventListener("afterprint", afterPrint);
  window.matchMedia("print").addEventListener("change", function (event) {
    if (event.matches) { beforePrint(); } else { afterPrint(); }
  });
  dark.addEventListener("change", drawAll);
  var widths = new WeakMap();
  var observer = new ResizeObserver(function (entries) {
    entries.forEach(function (entry) {
      var width = Math.round(entry.contentRect.width);
      if (widths.get(entry.target) !== width && width > 0 && !printing) {
        widths.set(entry.target, width);
        draw(entry.target);
      }
    });
  });
  document.querySelectorAll(".plot").forEach(function (element) { observer.observe(element); });
})();
