// The notes at the end of the page, and the first drawing.

function explain() {
  const lines = [
    `A text or an image has at most ${report.longest_text} tokens, because the size of the page grows with the square of their number.`,
    "Models run in float32 with eager attention. The weights are those that multiply the values, after all mechanisms. "
      + "A head of differential attention shows the difference of its two softmaxes, which are listed after the heads.",
    `The ${report.top} largest weights of each token, norms and similarities have four digits or more. Maps store the square root `
      + "of each weight in 127 steps, so weights read from a map are rounded, and small weights look larger than they are.",
    "The similarity of patterns is between 0 and 1 for probabilities. After a map across heads or a difference, weights are not probabilities.",
    ...(textOf(0).image ? ["In maps of images, the darkest shade is the largest weight of the layer; on the image, that of the selected token."] : []),
    "The JSON file next to this page has the same data.",
  ];
  document.querySelector("#about .prose").append(...lines.map((line) => make("p", {}, line)));
}

function fail(message) {
  document.getElementById("main").prepend(make("p", { class: "problem", role: "alert" }, message));
}

// The token that is selected at first: of an image, the class token.
function firstToken({ image, tokens }) {
  return image ? 0 : Math.floor((tokens.length * 2) / 3);
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
  await update({ layer: Math.floor(deepest() / 2), token: firstToken(queriesOf(0)), key: firstToken(keysOf(0)) });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => fail(`This page cannot be drawn: ${error.message}`));
