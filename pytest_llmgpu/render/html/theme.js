(() => {
  "use strict";
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const label = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    label();
    // A picture of the trend has its dark form first.
    for (const one of document.querySelectorAll("picture source")) one.media = isDark() ? "screen" : "not all";
  });
  dark.addEventListener("change", label);
  button.hidden = false;
  label();

  // A button beside each command copies it.
  for (const code of document.querySelectorAll(".next code")) {
    if (!/^(llmgpu|pytest|nvidia-smi) /.test(code.textContent)) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(code);
      document.execCommand("copy"); // a page that is not of https has no other way
      button.textContent = "Copied";
    });
    code.after(button);
  }
})();
