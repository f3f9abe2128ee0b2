// The form of an answer: a JSON schema or tools that were typed in, as fields of a request. Pure.

export function formFields({ schema = "", tools_text: tools = "", choice = "" }, kind) {
  const fields = {};
  if (schema.trim() !== "") {
    const found = parsed(schema, "the schema");
    const form = { type: "json_schema", json_schema: { name: "answer", schema: found } };
    fields.response_format = form;
  }
  if (tools.trim() !== "" && kind === "chat") {
    const found = parsed(tools, "the tools");
    fields.tools = (Array.isArray(found) ? found : [found]).map(asTool);
    if (choice !== "") fields.tool_choice = choice;
  }
  return fields;
}

// {"name": …, "parameters": …} is enough of a tool.
function asTool(given) {
  const made = given?.type === "function" ? given : { type: "function", function: given };
  if (typeof made.function?.name !== "string")
    throw new Error('a tool has no name (expected: {"name": "…", "parameters": {…}})');
  return made;
}

function parsed(text, what) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: no JSON (${error.message})`);
  }
  if (typeof found !== "object" || found === null) throw new Error(`${what}: no JSON object`);
  return found;
}
