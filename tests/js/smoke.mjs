// What the JavaScript client finds, as one line of JSON. Usage: node smoke.mjs BASE_URL
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "the quick brown fox" }];
const options = { model: "tested", messages, seed: 4, max_tokens: 30 };

const whole = await client.chat.completions.create(options);
let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...options,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
let refused = null;
try {
  await client.chat.completions.create({ ...options, temperature: -1 });
} catch (error) {
  refused = { kind: error.constructor.name, status: error.status, param: error.param };
}
let response = "";
for await (const event of await client.responses.create({ model: "tested", input: "hi", max_output_tokens: 9, stream: true })) {
  if (event.type === "response.output_text.delta") response += event.delta;
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, usage, refused, response, models }));
