// Example tools. They run in this page; the weather is invented.

const SKIES = ["sunny", "cloudy", "rainy", "windy"];

const TOOLS = {
  get_weather: {
    description: "Get the current weather in a city",
    properties: { city: { type: "string", description: "Name of the city" } },
    run({ city }) {
      const seed = [...String(city)].reduce((sum, letter) => sum + letter.codePointAt(0), 0);
      return `${SKIES[seed % SKIES.length]}, ${10 + seed % 15} degrees`;
    },
  },
  add: {
    description: "Add two numbers",
    properties: { a: { type: "number" }, b: { type: "number" } },
    run: ({ a, b }) => String(Number(a) + Number(b)),
  },
};

// In the form of the field `tools` of a request.
export const DEFINITIONS = Object.entries(TOOLS).map(([name, { description, properties }]) => ({
  type: "function",
  function: { name, description, parameters: { type: "object", properties, required: Object.keys(properties) } },
}));

// Returns the result of a call, or why there is none: the model reads both.
export function runTool(call) {
  try {
    if (!Object.hasOwn(TOOLS, call.function.name)) throw new Error(`there is no tool ${call.function.name}`);
    return TOOLS[call.function.name].run(JSON.parse(call.function.arguments));
  } catch (error) {
    return `error: ${error.message}`;
  }
}
