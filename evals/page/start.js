// What the page says of itself, and the first drawing.

function explain() {
  const lines = [
    `A page holds texts of up to ${report.longest_text} tokens, because what it stores grows with the square of that.`,
    "Models run in float32 with eager attention. The weights are those that values are multiplied with, after every "
      + "mechanism; a differential head is the difference of its two softmaxes, which are listed after the heads.",
    `The ${report.top} greatest weights of each token, norms and similarities are kept to four digits or more. Maps are kept in `
      + "127 steps of the root of the weight, so what is read off a map is rounded, and faint weights are drawn stronger than they are.",
    "Similarity of patterns lies between 0 and 1 where weights are probabilities; after a map across heads or a difference they need not be.",
    "The numbers are also in the JSON file beside this page, of which it was made.",
  ];
  document.querySelector("#about .prose").append(...lines.map((line) => make("p", {}, line)));
}

function fail(message) {
  document.getElementById("main").prepend(make("p", { class: "problem", role: "alert" }, message));
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    fail("This browser cannot unpack the data: it needs Chrome 103, Firefox 113, Safari 16.4 or newer.");
    return;
  }
  introduce();
  explain();
  prefersDark.addEventListener("change", () => {
    pending.add("theme");
    update({});
  });
  Object.keys(state).forEach((name) => pending.add(name));
  await update({ layer: Math.floor(deepest() / 2), token: Math.floor((textOf(0).tokens.length * 2) / 3) });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => fail(`This page cannot be drawn: ${error.message}`));
