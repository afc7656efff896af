(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;

  const options = {
    actions: false,
    ast: true, // evaluate expressions without eval, which the content security policy forbids
    config: data.config,
    defaultStyle: false,
    mode: "vega-lite",
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  };

  const draw = async (place, spec) => {
    try {
      await window.vegaEmbed(place, spec, options);
      place.dataset.drawn = "yes";
    } catch (error) {
      place.classList.add("failed");
      place.textContent = `The chart could not be drawn: ${error.message}. The table below has its data.`;
    }
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
    const whole = made("figure", {}, made("h3", {}, chart.title), made("figcaption", {}, chart.summary), place, details);
    return { whole, place };
  };

  const choice = document.getElementById("case");
  const showCase = (event) => {
    const figures = data.cases[choice.value].map((chart) => ({ spec: chart.spec, ...figure(chart) }));
    document.getElementById("case-charts").replaceChildren(...figures.map(({ whole }) => whole));
    if (event) document.getElementById("case-status").textContent = `${figures.length} charts of ${choice.value}`;
    return Promise.all(figures.map(({ place, spec }) => draw(place, spec)));
  };

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  button.hidden = false;
  label();

  // Everything except data and logs is opened for printing, and closed again afterwards.
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open], .data, .log)")];
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => { for (const details of opened) details.open = false; });

  const places = [...document.querySelectorAll("[data-chart]")];
  const drawn = places.map((place) => draw(place, data.charts[place.dataset.chart]));
  if (choice) {
    choice.addEventListener("change", showCase);
    drawn.push(showCase());
  }
  Promise.all(drawn).then(() => { root.dataset.ready = "yes"; });
})();
