// The report, and the unpacked data of the selected layer of each model.

const report = JSON.parse(document.getElementById("data").textContent);
const models = report.models;
const LEVELS = 127;

async function unpack(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const whole = packed.bits === 8 ? new Int8Array(buffer) : new Int16Array(buffer);
  return { whole, scale: packed.scale, shape: packed.shape };
}

// The numbers of a matrix by row and column.
function numbers(unpacked) {
  const [rows, columns] = unpacked.shape;
  return { rows, columns, at: (row, column) => unpacked.whole[row * columns + column] * unpacked.scale };
}

async function openLayer(model, text, layer) {
  const record = layersIn(model, models[model].texts[text])[layer];
  if (!record) return null;
  const routing = record.routing;
  const packed = [
    record.maps, record.keys.index, record.keys.weight, record.queries.index, record.queries.weight,
    record.value_norms, record.output_norms, ...(routing ? [routing.gates, routing.scores] : []),
  ];
  const [maps, keys, keyWeights, queries, queryWeights, values, outputs, gates, scores] = await Promise.all(
    packed.map(unpack),
  );
  return {
    record, causal: partOf(model).causal, maps, gates, scores, values: numbers(values), outputs: numbers(outputs),
    keys: { index: keys, weight: keyWeights }, queries: { index: queries, weight: queryWeights },
  };
}

function levelAt(opened, map, query, key) {
  const [, queries, keys] = opened.maps.shape;
  return opened.maps.whole[(map * queries + query) * keys + key];
}

function weightAt(opened, map, query, key) {
  const level = levelAt(opened, map, query, key) / LEVELS;
  return Math.sign(level) * level * level * opened.maps.scale;
}

// The tokens with the largest weights, which are exact, unlike those of the map.
function greatest(side, map, token) {
  const [, size, count] = side.index.shape;
  const start = (map * size + token) * count;
  return Array.from({ length: count }, (_, index) => ({
    token: side.index.whole[start + index],
    weight: side.weight.whole[start + index] * side.weight.scale,
  })).filter((each) => each.token >= 0);
}
