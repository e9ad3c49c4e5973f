// Sessions as trees of calls. Sampled tokens are coloured by policy version; those of messages and tools have no colour.
// The session in the address (`#sessions/NAME`) is shown, so a link leads to it.
import { getAt, runName } from "/console/api.js";
import { card, clock, empty, filters, h, number, table } from "/console/elements.js";
import { openGroup } from "/console/trajectories.js";
import { NUM_COLOURS, tokenRow } from "/console/tokens.js";

const PAGE = 50, MAX_INDENTS = 6;
const chosen = { token: "" };
const GOOD = { FINISHED: "good", COMPLETE: "good", FAILED: "bad" };
const query = (values) => new URLSearchParams({ run: runName, ...values });
const wanted = () => decodeURIComponent(location.hash.split("/").slice(1).join("/"));
const show = (id) => { location.hash = `#sessions/${encodeURIComponent(id)}`; };
const tag = (state, text = state) => h("span", { class: `tag ${GOOD[state] ?? ""}` }, text);
const reward = (value, state) => (value === null ? (state === "FINISHED" ? "abandoned, no reward" : "no reward yet") : `reward ${number(value)}`);

function sampledToken(call, index, versions) {
  const version = call.policy_versions[index], logProb = number(call.log_probs[index]);
  return {
    text: call.tokens[index] ?? `⟨${call.token_ids[index]}⟩`, kind: `v${versions.indexOf(version) % NUM_COLOURS}`,
    description: `sampled: version ${version}, log-prob ${logProb}, call ${call.number}`,
  };
}

function insertedToken(call, index) {
  return { text: call.inserted_tokens[index] ?? `⟨${call.inserted_token_ids[index]}⟩`, kind: "inserted", description: `inserted before call ${call.number}, not sampled` };
}

function tokensOf(call, versions) {
  const tokens = [...call.inserted_token_ids.map((_, i) => insertedToken(call, i)), ...call.token_ids.map((_, i) => sampledToken(call, i, versions))];
  const left = call.num_inserted + call.num_sampled - tokens.length;
  return [tokens.length ? tokenRow(tokens) : null, left ? h("p", { class: "empty" }, `${number(left)} more tokens are not shown.`) : null];
}

function shownCall(call, { children, versions, leaves }) {
  const num = children.get(call.number)?.length ?? 0, path = leaves.get(call.number);
  const facts = [`${number(call.num_inserted)} inserted, ${number(call.num_sampled)} sampled`, call.finish_reason, `temperature ${number(call.sampling.temperature)}`, call.server_id, clock(call.finished_at_ms)];
  return [
    h("h3", {}, `Call ${call.number} `, num > 1 ? h("span", { class: "tag" }, `fork: ${num} calls continue it`) : null, h("span", { class: "quiet" }, ` ${facts.join(" · ")}`)),
    tokensOf(call, versions),
    path ? h("p", { class: "path-end" }, `End of path ${path.index}: ${reward(path.reward)}, ${number(path.num_trained_tokens)} tokens trained here`) : null,
  ];
}

// The call and those after it, one below the other until a fork. Only forks are indented, so that a long conversation
// fits on a phone.
function line(call, shape, depth) {
  const rows = [];
  for (let next = [call]; next.length; ) {
    const [one] = next;
    next = shape.children.get(one.number) ?? [];
    const forks = next.length > 1 ? h("ul", { class: depth < MAX_INDENTS ? "forks" : "" }, next.map((each) => h("li", {}, line(each, shape, depth + 1)))) : null;
    rows.push(h("li", { "aria-label": `call ${one.number}` }, shownCall(one, shape), forks));
    if (forks) break;
  }
  return h("ul", {}, rows);
}

function tree(session) {
  const children = new Map(), versions = [...new Set(session.calls.flatMap((call) => call.policy_versions))].sort((a, b) => a - b);
  for (const call of session.calls) children.set(call.parent, [...(children.get(call.parent) ?? []), call]);
  const leaves = new Map(session.paths.map((path, index) => [path.calls.at(-1), { ...path, index }]));
  const roots = children.get(null) ?? [];
  return [
    h("p", { class: "legend" }, versions.map((version, i) => h("span", {}, h("i", { class: `v${i % NUM_COLOURS}` }), `version ${version}`)),
      h("span", {}, h("i", { class: "inserted" }), "messages, tools and environment: not sampled, not trained")),
    roots.length > 1 ? h("p", { class: "empty" }, `${roots.length} calls begin a path: the harness changed its history, or began another conversation.`) : null,
    h("div", { class: "tree" }, roots.map((root) => line(root, { children, versions, leaves }, 0))),
  ];
}

function pathTable(session) {
  const rows = session.paths.map((path, index) => [
    `path ${index}`, path.calls.join(" → "), path.calls.length === path.trained_calls.length ? "all" : path.trained_calls.join(", "),
    number(path.num_trained_tokens), path.reward === null ? "–" : number(path.reward),
  ]);
  return rows.length ? table("Paths and their rewards", [["path"], ["calls", "wide"], ["trained here"], ["tokens trained", "number"], ["reward", "number"]], rows) : null;
}

function rest(session) {
  const cut = session.calls.find((call) => call.num_inserted + call.num_sampled > call.inserted_token_ids.length + call.token_ids.length && call.number >= chosen.from);
  return h("div", { class: "buttons" },
    cut && cut.number > chosen.from ? h("button", { type: "button", onclick: () => { chosen.from = cut.number; chosen.refresh(); } }, `Show tokens from call ${cut.number}`) : null,
    chosen.from ? h("button", { type: "button", onclick: () => { chosen.from = 0; chosen.refresh(); } }, "Show tokens from call 0") : null);
}

async function inspector(id) {
  const session = await getAt(`/v1/sessions/${encodeURIComponent(id)}?${query({ from_call: chosen.from })}`);
  const task = session.task_id ? await getAt(`/v1/tasks/${encodeURIComponent(session.task_id)}?${query({})}`).catch(() => null) : null;
  const parts = Object.entries(session.reward_parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const groups = session.prompt_ids.map((prompt) => h("button", { type: "button", onclick: () => openGroup(prompt) }, `Group of prompt ${prompt}`));
  return card(`Session ${session.session_id}`,
    h("div", { class: "buttons", role: "group", "aria-label": "State" }, tag(session.state), h("span", { class: "tag" }, `${reward(session.reward, session.state)}${parts ? ` (${parts})` : ""}`),
      task ? tag(task.state, `task ${task.task_id} ${task.state}: ${task.num_rewarded} of ${task.num_sessions} rewarded, ${task.num_failed} failed`) : null,
      session.task_id && !task ? h("span", { class: "tag" }, `task ${session.task_id}`) : null, groups),
    session.calls.length ? [pathTable(session), tree(session), rest(session)]
      : empty(session.prompt_ids.length ? "It is trained as a group, and its calls are forgotten." : "It is part of no group: another session had its place, it was given back, or its task had ended."));
}

export async function sessions(refresh) {
  const page = await getAt(`/v1/sessions?${query({ page_size: PAGE, page_token: chosen.token })}`), id = wanted();
  if (id !== chosen.id) Object.assign(chosen, { id, from: 0 });
  chosen.refresh = refresh;
  const rows = page.sessions.map((session) => [
    h("button", { type: "button", "aria-pressed": String(session.session_id === id), onclick: () => show(session.session_id) }, session.session_id),
    tag(session.state), session.task_id || "–", number(session.num_calls), number(session.num_bytes), session.reward === null ? "–" : number(session.reward),
  ]);
  const turn = (token) => { chosen.token = token; refresh(); };
  const list = card("Sessions", filters([["id", "Session", "text"]], { id }, (values) => { values.id === id ? refresh() : show(values.id); },
    chosen.token ? h("button", { type: "button", onclick: () => turn("") }, "Newest") : null,
    page.next_page_token ? h("button", { type: "button", onclick: () => turn(page.next_page_token) }, "Older") : null),
  rows.length ? table("Sessions whose calls are kept", [["session", "wide"], ["state"], ["task"], ["calls", "number"], ["bytes", "number"], ["reward", "number"]], rows)
    : empty("There are no sessions: no call with X-Penstock-Session was made, or all are groups by now."));
  return [id ? await inspector(id).catch((error) => card(`Session ${id}`, empty(error.message))) : null, list];
}
