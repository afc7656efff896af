(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const all = (selector) => [...document.querySelectorAll(selector)];

  const options = {
    actions: false,
    ast: true, // evaluate expressions without eval, which the content security policy forbids
    config: data.config,
    defaultStyle: false,
    mode: "vega-lite",
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  };
  const FEW = 40; // up to this number of charts all are drawn, for printing

  // The filters: the selected strategy, model and batch size; an empty value selects all.
  const filters = all("[data-filter]");
  const chosen = () => Object.fromEntries(filters.map((select) => [select.dataset.filter, select.value]));
  const FIELDS = { strategy: "s", batch: "b" };
  const filtered = (value, selected) => {
    if (Array.isArray(value)) {
      return value
        .filter((row) => Object.entries(FIELDS).every(([name, field]) =>
          !selected[name] || row === null || typeof row !== "object" || !(field in row) || String(row[field]) === selected[name]))
        .map((item) => filtered(item, selected));
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, filtered(item, selected)]));
  };

  // A chart is drawn when it comes near the screen, and again after the filters changed.
  const specs = new Map();
  const turns = new Map(); // the last drawing of each place: the next one waits for it
  const embed = async (place) => {
    if (!specs.has(place)) return; // a chart of a case that is no longer chosen
    try {
      await window.vegaEmbed(place, filtered(specs.get(place)(), chosen()), options);
      place.querySelector("svg").setAttribute("aria-hidden", "true"); // the place has the name, the table the data
    } catch (error) {
      place.classList.add("failed");
      place.textContent = `The chart could not be drawn: ${error.message}. The table below has its data.`;
    }
  };
  const draw = (place) => {
    if (!place.dataset.drawn && !place.closest("[hidden]")) {
      place.dataset.drawn = "yes";
      turns.set(place, Promise.resolve(turns.get(place)).then(() => embed(place)));
    }
    return turns.get(place);
  };
  const isNear = (place) => {
    const { top, bottom, height } = place.getBoundingClientRect();
    return height > 0 && bottom > -400 && top < window.innerHeight + 400;
  };
  const drawNear = () => Promise.all([...specs.keys()].filter((place) => place.isConnected && isNear(place)).map(draw));
  const observer = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
    { rootMargin: "400px" },
  );
  const add = (place, spec) => {
    specs.set(place, spec);
    observer.observe(place);
  };

  const made = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };

  const table = (chart) => {
    const head = made("tr", {}, ...chart.headers.map((text) => made("th", { scope: "col" }, text)));
    const cells = (row) => row.map((text, i) => (i ? made("td", {}, text) : made("th", { scope: "row" }, text)));
    const body = chart.rows.map((row) => made("tr", {}, ...cells(row)));
    const caption = made("caption", { class: "unseen" }, chart.title);
    return made("table", {}, caption, made("thead", {}, head), made("tbody", {}, ...body));
  };

  const figure = (chart) => {
    const label = `Chart: ${chart.title}. The table below has its data.`;
    const place = made("div", { class: "chart", role: "img", "aria-label": label });
    const region = made("div", { class: "scroll", role: "region", "aria-label": `Data of ${chart.title}`, tabindex: "0" });
    const details = made("details", { class: "data" }, made("summary", {}, "Data"), region);
    // A table may have thousands of rows: it is made when it is opened.
    details.addEventListener("toggle", () => region.hasChildNodes() || region.append(table(chart)));
    add(place, () => chart.spec);
    return made("figure", {}, made("h3", {}, chart.title), made("figcaption", {}, chart.summary), place, details);
  };

  const choice = document.getElementById("case");
  const showCase = (event) => {
    const source = all("script[data-case]").find((element) => element.dataset.case === choice.value);
    const figures = JSON.parse(source.textContent).map(figure);
    const charts = document.getElementById("case-charts");
    for (const place of charts.querySelectorAll(".chart")) {
      specs.delete(place);
      turns.delete(place);
      observer.unobserve(place);
    }
    charts.replaceChildren(...figures);
    if (!event) return;
    for (const place of charts.querySelectorAll(".chart")) draw(place);
    document.getElementById("case-status").textContent = `${figures.length} charts of ${choice.value}`;
  };

  const applyFilters = () => {
    const selected = chosen();
    const names = Object.keys(selected);
    for (const element of all("main [data-strategy], main [data-model], main [data-batch]")) {
      element.hidden = names.some(
        (name) => selected[name] && name in element.dataset && element.dataset[name] !== selected[name],
      );
      if (element.tagName === "OPTION") element.disabled = element.hidden;
    }
    for (const place of specs.keys()) {
      delete place.dataset.drawn;
      observer.unobserve(place); // observed again, a place that was near before and still is, is reported too
      observer.observe(place);
    }
    if (choice && choice.selectedOptions[0]?.disabled) {
      const first = [...choice.options].find((option) => !option.disabled);
      if (first) {
        choice.value = first.value;
        showCase();
      }
    }
    const shown = names.filter((name) => selected[name]).map((name) => `${name} ${selected[name]}`);
    document.getElementById("filter-status").textContent = shown.length ? `Only ${shown.join(", ")}` : "All cases";
    return drawNear();
  };

  // Everything except data and logs is opened for printing, and closed again afterwards.
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = all("details:not([open], .data, .log)");
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => { for (const details of opened) details.open = false; });

  for (const place of all("[data-chart]")) {
    add(place, () => JSON.parse(place.nextElementSibling.textContent));
    const details = place.parentElement.querySelector("details");
    const text = details.querySelector("noscript");
    details.addEventListener("toggle", () => {
      if (text.isConnected) text.outerHTML = text.textContent; // the table is markup that is already in the page
    });
  }
  if (choice) {
    choice.addEventListener("change", showCase);
    showCase();
  }
  if (filters.length) {
    filters[0].form.hidden = false;
    filters[0].form.addEventListener("change", applyFilters);
  }
  drawNear().then(async () => {
    root.dataset.ready = "yes";
    if (specs.size > FEW) return;
    for (const place of [...specs.keys()]) {
      // Safari has no idle callback, and a busy browser may never be idle.
      await new Promise((done) => (window.requestIdleCallback ? requestIdleCallback(done, { timeout: 500 }) : setTimeout(done)));
      if (place.isConnected) await draw(place);
    }
    root.dataset.whole = "yes";
  });
})();
