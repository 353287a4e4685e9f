// Colour scales for light and dark, from the background to the strongest shade.

const SHADES = {
  light: {
    key: ["#ffffff", "#dbe9f6", "#a6cbe8", "#5ea2d3", "#2572b4", "#0b3d79"],
    query: ["#ffffff", "#fde8d3", "#fbc48d", "#f29345", "#cf5f0a", "#7f3200"],
    minus: ["#ffffff", "#fbe0e6", "#f3aabb", "#df6485", "#b62459", "#6a0a35"],
    ink: ["#1c2128", "#ffffff"],
    outside: "#eef0f3",
  },
  dark: {
    key: ["#171b21", "#17324e", "#1b568a", "#3285c6", "#7cbcee", "#e2f2ff"],
    query: ["#171b21", "#42260f", "#7d420f", "#c06a1b", "#f0a457", "#ffe9cf"],
    minus: ["#171b21", "#43182a", "#7f2247", "#c0406f", "#ee8bab", "#ffe3ec"],
    ink: ["#e7eaee", "#0f1216"],
    outside: "#0d1014",
  },
};
const STEPS = 127;
const THEMES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const tables = {};

function scheme() {
  const theme = document.documentElement.dataset.theme || "auto";
  return theme === "auto" ? (prefersDark.matches ? "dark" : "light") : theme;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function table(name) {
  const key = `${scheme()} ${name}`;
  if (!tables[key]) {
    const stops = SHADES[scheme()][name].map(channels);
    tables[key] = Array.from({ length: STEPS + 1 }, (_, step) => {
      const place = (step / STEPS) * (stops.length - 1);
      const below = Math.min(Math.floor(place), stops.length - 2);
      return stops[below].map((low, index) => Math.round(low + (stops[below + 1][index] - low) * (place - below)));
    });
  }
  return tables[key];
}

// `part` is from -1 to 1; negative values have another colour.
function rgb(part, name = "key") {
  const step = Math.min(STEPS, Math.round(Math.abs(part) * STEPS));
  return table(part < 0 ? "minus" : name)[step];
}

function css(part, name = "key") {
  return `rgb(${rgb(part, name).join(" ")})`;
}

// The text colour on a shade.
function inkOn(part, name = "key") {
  const [red, green, blue] = rgb(part, name);
  const bright = (0.299 * red + 0.587 * green + 0.114 * blue) / 255;
  const [plain, turned] = SHADES[scheme()].ink;
  return bright > 0.55 === (scheme() === "light") ? plain : turned;
}

function gradient(low, name = "key") {
  const parts = Array.from({ length: 9 }, (_, index) => css(low + ((1 - low) * index) / 8, name));
  return `linear-gradient(to right, ${parts.join(", ")})`;
}
