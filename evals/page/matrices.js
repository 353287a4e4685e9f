// The learnt matrices of the mechanisms of a layer.

const unpackedMatrices = new Map();

async function opening(matrix) {
  if (!unpackedMatrices.has(matrix)) unpackedMatrices.set(matrix, numbers(await unpack(matrix.values)));
  return unpackedMatrices.get(matrix);
}

function withIdentity(stored) {
  return { ...stored, at: (row, column) => stored.at(row, column) + (row === column ? 1 : 0) };
}

// The norm of the difference from the identity, relative to the norm of the identity.
function strayed(stored) {
  let sum = 0;
  for (let row = 0; row < stored.rows; row += 1) {
    for (let column = 0; column < stored.columns; column += 1) sum += stored.at(row, column) ** 2;
  }
  return Math.sqrt(sum / stored.rows);
}

function noteOf(matrix, stored) {
  const shape = `${matrix.shape[0]} × ${matrix.shape[1]}`;
  if (matrix.plus_identity) return `${shape}, ${percent(strayed(stored))} from the identity`;
  const drawn = [stored.rows, stored.columns];
  const joined = drawn.some((size, side) => size !== matrix.shape[side]);
  return joined ? `${shape}, drawn as ${drawn.join(" × ")} root mean squares` : shape;
}

function matrixCard(matrix, stored) {
  const differs = matrix.plus_identity && state.difference;
  const shown = matrix.plus_identity && !state.difference ? withIdentity(stored) : stored;
  const flat = { ...shown, flat: shown.columns > 4 * shown.rows };
  return matrixFigure(flat, `${matrix.name}${differs ? " − identity" : ""}`, noteOf(matrix, stored));
}

async function fillMatrices(box, model) {
  const part = partOf(model).name;
  const name = layerName();
  const here = models[model].matrices.filter((matrix) => matrix.part === part && matrix.layers.includes(state.layer));
  const stored = await Promise.all(here.map(opening));
  if (name !== layerName()) return;
  if (!here.length) {
    box.append(make("p", { class: "none" }, `${capital(name)} has no mechanism: its attention is stock.`));
    return;
  }
  for (const mechanism of new Set(here.map((matrix) => matrix.mechanism))) {
    const cards = here.flatMap((matrix, index) => (matrix.mechanism === mechanism ? [matrixCard(matrix, stored[index])] : []));
    box.append(
      make("h3", {}, mechanism), make("p", { class: "note" }, models[model].mechanisms[mechanism]),
      make("div", { class: "cards" }, cards),
    );
  }
}

section(["layer", "difference", "theme"], () => {
  document.getElementById("matrices").hidden = models.every((model) => !model.matrices.length);
  document.getElementById("matrices-title").textContent = `Learnt matrices of ${layerName()}`;
  const tools = document.querySelector("#matrices .tools");
  if (!tools.firstChild && models.some((model) => model.matrices.some((matrix) => matrix.plus_identity))) {
    const box = make("input", { type: "checkbox", onchange: (event) => update({ difference: event.target.checked }) });
    tools.append(make("label", { class: "control" }, box, make("span", {}, "difference from the identity")));
  }
  columns("matrices", fillMatrices);
});
