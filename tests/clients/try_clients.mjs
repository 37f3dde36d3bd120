// What people call such a server with from JavaScript: each client asks, calls a tool and says what that returned.
//
// node try_clients.mjs URL MODEL, then the same for pictures and sounds, and for speech

import assert from 'node:assert/strict';

import { createOpenAI } from '@ai-sdk/openai';
import { HumanMessage, ToolMessage } from '@langchain/core/messages';
import { ChatOpenAI } from '@langchain/openai';
import { experimental_transcribe, generateObject, generateText, stepCountIs, streamText, tool } from 'ai';
import OpenAI, { toFile } from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const ARGUMENTS = { city: 'Ulm', days: 3 };
const RAIN = 'It rains in Ulm.';
const QUESTION = 'How is the weather in Ulm?';
const PICTURE =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC';
const PICTURE_URL = `data:image/png;base64,${PICTURE}`;
const RATE = 16_000;
const SECONDS = 2; // of silence

// A WAV file.
const RECORDING = Buffer.alloc(44 + 2 * RATE * SECONDS);
RECORDING.write('RIFF', 0);
RECORDING.writeUInt32LE(RECORDING.length - 8, 4);
RECORDING.write('WAVEfmt ', 8);
[16, 1 | (1 << 16), RATE, 2 * RATE, 2 | (16 << 16)].forEach((word, place) => RECORDING.writeUInt32LE(word, 16 + 4 * place));
RECORDING.write('data', 36);
RECORDING.writeUInt32LE(RECORDING.length - 44, 40);
const SOUND = { type: 'input_audio', input_audio: { data: RECORDING.toString('base64'), format: 'wav' } };

const Weather = z.object({ city: z.string(), days: z.number().int() });
// In a form that has an end, since the model chooses anything else at random.
const Report = z.object({ city: z.enum(['Ulm', 'Aalen']), days: z.enum(['1', '2']) });
const PARAMETERS = { ...z.toJSONSchema(Weather), $schema: undefined };

const [url, model, picturesUrl, picturesModel, speechUrl, speechModel] = process.argv.slice(2);

async function tryOpenai() {
  const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
  const messages = [{ role: 'user', content: QUESTION }];
  const tools = [{ type: 'function', function: { name: 'Weather', parameters: PARAMETERS, strict: true } }];
  const answer = await client.chat.completions.create({ model, messages, tools });
  const [call] = answer.choices[0].message.tool_calls;
  assert.deepEqual(JSON.parse(call.function.arguments), ARGUMENTS);
  const returned = { role: 'tool', tool_call_id: call.id, content: 'Rain' };
  const again = await client.chat.completions.create({
    model,
    messages: [...messages, answer.choices[0].message, returned],
    tools,
  });
  assert.equal(again.choices[0].message.content, RAIN);
  let text = '';
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? '';
  }
  assert.equal(text, RAIN);
  const response_format = zodResponseFormat(Report, 'report');
  const parsed = await client.chat.completions.parse({ model, messages, response_format });
  Report.parse(parsed.choices[0].message.parsed);
  const runner = client.chat.completions.runTools({
    model,
    messages,
    tools: [{ type: 'function', function: { name: 'Weather', parameters: PARAMETERS, parse: JSON.parse, function: () => 'Rain' } }],
  });
  assert.equal(await runner.finalContent(), RAIN);
}

async function trySounds() {
  const client = new OpenAI({ baseURL: picturesUrl, apiKey: 'none', maxRetries: 0 });
  const messages = [{ role: 'user', content: [SOUND, { type: 'text', text: 'What is this?' }] }];
  const answer = await client.chat.completions.create({ model: picturesModel, messages, max_tokens: 9 });
  assert.equal(answer.usage.prompt_tokens, 64 + 3); // a medium counts as 64 words
  const chat = createOpenAI({ baseURL: picturesUrl, apiKey: 'none' }).chat(picturesModel);
  const content = [
    { type: 'text', text: 'What is this?' },
    { type: 'file', mediaType: 'audio/wav', data: RECORDING },
  ];
  const heard = await generateText({ model: chat, messages: [{ role: 'user', content }], maxOutputTokens: 9, maxRetries: 0 });
  assert.equal(heard.usage.inputTokens, 64 + 3);
  const plain = new ChatOpenAI({ model: picturesModel, apiKey: 'none', configuration: { baseURL: picturesUrl }, maxRetries: 0 });
  const said = await plain.invoke([new HumanMessage({ content: [SOUND, { type: 'text', text: 'What is this?' }] })]);
  assert.equal(said.usage_metadata.input_tokens, 64 + 3);
}

async function trySpeech() {
  const client = new OpenAI({ baseURL: speechUrl, apiKey: 'none', maxRetries: 0 });
  const options = { model: speechModel, language: 'en' };
  const file = async () => toFile(RECORDING, 'speech.wav', { type: 'audio/wav' });
  const { text } = await client.audio.transcriptions.create({ ...options, file: await file() });
  let last;
  for await (const event of await client.audio.transcriptions.create({ ...options, file: await file(), stream: true })) last = event;
  assert.deepEqual([last.type, last.text], ['transcript.text.done', text]);
  const hearing = createOpenAI({ baseURL: speechUrl, apiKey: 'none' }).transcription(speechModel);
  const heard = await experimental_transcribe({ model: hearing, audio: RECORDING, providerOptions: { openai: { language: 'en' } } });
  assert.deepEqual([heard.text, heard.language, heard.durationInSeconds], [text, 'en', SECONDS]);
  assert.equal(heard.segments.map((segment) => segment.text).join('').trim(), text);
  const openai = { language: 'en', timestampGranularities: ['word'] };
  const timed = await experimental_transcribe({ model: hearing, audio: RECORDING, providerOptions: { openai } });
  assert.equal(timed.segments.map((word) => word.text).join(''), text.replaceAll(/\s/g, ''));
}

async function tryResponses() {
  const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 });
  const tools = [{ type: 'function', name: 'Weather', parameters: PARAMETERS, strict: true }];
  const answer = await client.responses.create({ model, input: QUESTION, tools });
  const call = answer.output.find((item) => item.type === 'function_call');
  assert.deepEqual(JSON.parse(call.arguments), ARGUMENTS);
  const output = { type: 'function_call_output', call_id: call.call_id, output: 'Rain' };
  const again = await client.responses.create({ model, input: [output], previous_response_id: answer.id, tools });
  assert.equal(again.output_text, RAIN);
  assert.equal((await client.responses.retrieve(again.id)).output_text, RAIN);
  const kinds = [];
  for await (const item of client.responses.inputItems.list(again.id, { order: 'asc', limit: 2 })) kinds.push(item.type);
  assert.deepEqual(kinds, ['message', 'message', 'function_call', 'function_call_output']);
  await client.responses.delete(again.id);
  await assert.rejects(client.responses.retrieve(again.id), OpenAI.NotFoundError);
  let text = '';
  for await (const event of await client.responses.create({ model, input: QUESTION, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta;
  }
  assert.equal(text, RAIN);
  const parsed = await client.responses.parse({ model, input: QUESTION, text: { format: zodTextFormat(Report, 'report') } });
  Report.parse(parsed.output_parsed);
}

async function tryAiSdk(chosen, pictures) {
  const tools = { Weather: tool({ inputSchema: Weather, strict: true, execute: async () => 'Rain' }) };
  const result = await generateText({ model: chosen, prompt: QUESTION, tools, stopWhen: stepCountIs(3), maxRetries: 0 });
  assert.equal(result.text, RAIN);
  assert.deepEqual(result.steps[0].toolCalls[0].input, ARGUMENTS);
  const streamed = streamText({ model: chosen, prompt: QUESTION, tools, stopWhen: stepCountIs(3), maxRetries: 0 });
  let text = '';
  for await (const piece of streamed.textStream) text += piece;
  assert.ok(text.endsWith(RAIN), text);
  const { object } = await generateObject({ model: chosen, schema: Report, prompt: QUESTION, maxRetries: 0 });
  Report.parse(object);
  const content = [
    { type: 'text', text: 'What is this?' },
    { type: 'image', image: PICTURE_URL },
  ];
  const seen = await generateText({ model: pictures, messages: [{ role: 'user', content }], maxOutputTokens: 3, maxRetries: 0 });
  assert.ok(seen.text.startsWith('[synthetic]'), seen.text);
}

async function tryLangchain(options) {
  const configuration = { baseURL: url };
  const plain = new ChatOpenAI({ model, apiKey: 'none', configuration, maxRetries: 0, ...options });
  const chat = plain.bindTools([{ type: 'function', function: { name: 'Weather', parameters: PARAMETERS } }], { strict: true });
  const answer = await chat.invoke(QUESTION);
  assert.deepEqual(answer.tool_calls[0].args, ARGUMENTS);
  const returned = new ToolMessage({ content: 'Rain', tool_call_id: answer.tool_calls[0].id });
  assert.equal((await chat.invoke([new HumanMessage(QUESTION), answer, returned])).text, RAIN);
  let text = '';
  for await (const chunk of await plain.stream(QUESTION)) text += chunk.text;
  assert.equal(text, RAIN);
  Report.parse(await plain.withStructuredOutput(Report, { method: 'jsonSchema' }).invoke(QUESTION));
  const seeing = new ChatOpenAI({
    model: picturesModel,
    apiKey: 'none',
    configuration: { baseURL: picturesUrl },
    maxRetries: 0,
    ...options,
  });
  const content = [
    { type: 'text', text: 'What is this?' },
    { type: 'image_url', image_url: { url: PICTURE_URL } },
  ];
  assert.ok((await seeing.invoke([new HumanMessage({ content })])).text.startsWith('[synthetic]'));
}

const ai = createOpenAI({ baseURL: url, apiKey: 'none' });
const seeing = createOpenAI({ baseURL: picturesUrl, apiKey: 'none' });
const attempts = {
  'openai-node, chats': tryOpenai,
  'openai-node, responses': tryResponses,
  'AI SDK, its default': () => tryAiSdk(ai(model), seeing(picturesModel)),
  'AI SDK, chats': () => tryAiSdk(ai.chat(model), seeing.chat(picturesModel)),
  'openai-node, AI SDK and LangChain.js, sounds': trySounds,
  'openai-node and AI SDK, speech': trySpeech,
  'LangChain.js, chats': () => tryLangchain({ useResponsesApi: false }),
  'LangChain.js, responses': () => tryLangchain({ useResponsesApi: true }),
};
let failed = 0;
for (const [name, attempt] of Object.entries(attempts)) {
  try {
    await attempt();
    console.log(`${name}: as it should be`);
  } catch (error) {
    failed += 1;
    console.log(`${name}:`, error);
  }
}
process.exit(failed ? 1 : 0);
