// Similarity of heads as in table B of the Mixture-of-Head paper, with the values of all pairs.

const SIDES = { patterns: "attention patterns", outputs: "outputs" };

function similarityTable() {
  const row = (model, index) => {
    const means = textOf(index).mean_similarity;
    return make(
      "tr", {}, make("th", { scope: "row", class: `model-${index}` }, model.name),
      Object.keys(SIDES).map((side) => make("td", { class: "number" }, means[side] === null ? "–" : means[side].toFixed(4))),
    );
  };
  const head = make("tr", {}, make("th", { scope: "col" }, `mean over pairs${hasParts() ? ", layers and parts" : " and layers"}`),
    Object.values(SIDES).map((name) => make("th", { scope: "col", class: "number" }, name)));
  return make("div", { class: "scroll" }, make("table", { class: "plain" }, make("thead", {}, head), make("tbody", {}, models.map(row))));
}

function byLayer(side) {
  const lines = models.map((_, model) => ({
    values: layersOf(model).map((layer) => layer.mean_similarity[side]), kind: `model-${model}`,
  }));
  const label = `similarity of ${SIDES[side]}, by layer`;
  if (lines.every((line) => line.values.every((value) => value === null))) return null;
  return make("figure", { class: "card" }, make("figcaption", {}, make("b", {}, label)),
    lineChart(lines, { label, across: "layer", mark: state.layer }));
}

function square(rows) {
  return { rows: rows.length, columns: rows.length, at: (row, column) => rows[row][column] };
}

section(["text", "layer", "theme"], () => {
  document.getElementById("similarity-title").textContent = "Similarity of heads";
  document.querySelector("#similarity .tools").replaceChildren(
    similarityTable(), make("div", { class: "cards wide" }, ...Object.keys(SIDES).map(byLayer).filter(Boolean)),
  );
  columns("similarity", (box, model) => {
    const layer = opened[model];
    if (!layer) return box.append(absent(model));
    const { pattern_similarity: patterns, output_similarity: outputs } = layer.record;
    const signed = (rows) => rows.some((row) => row.some((value) => value < 0));
    const figure = (rows, title) => matrixFigure(square(rows), `${title}, ${layerName()}`, "", { high: 1, signed: signed(rows) });
    return box.append(make("div", { class: "cards" }, figure(patterns, "patterns"), figure(outputs, "outputs")));
  });
});
