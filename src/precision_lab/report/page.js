// Draws each chart into its place, and gives each command a button that copies it. Nothing is fetched.
const told = document.getElementById("specs");
const specs = told ? JSON.parse(told.textContent) : {};
const options = {
  mode: "vega-lite",
  renderer: "svg",
  actions: false,
  defaultStyle: false,
  tooltip: { disableDefaultStyle: true },
};
Promise.all(Object.entries(specs).map(([id, spec]) => vegaEmbed(document.getElementById(id), spec, options)))
  .then(() => document.documentElement.setAttribute("data-drawn", "yes"));

for (const block of navigator.clipboard ? document.querySelectorAll(".command") : []) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("code").textContent);
    button.textContent = "Copied";
  });
  block.append(button);
}
