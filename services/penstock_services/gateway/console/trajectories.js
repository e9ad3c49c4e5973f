// Lists groups that wait for the learner, and groups that it has taken. Shows the tokens of one group, coloured by policy
// version, by log-prob, or by how much the learner's log-prob differs, with its prompt and ground truth.
import { get } from "/console/api.js";
import { card, empty, filters, h, number, table, texts, truth } from "/console/elements.js";
import { NUM_COLOURS, rowOf } from "/console/tokens.js";

const DOUBTFUL_NATS = 6, DIFFERENT_NATS = 0.5, PAGE = 100;
const chosen = { promptId: null, colouring: "version", order: "prompt", source: "", min: "", max: "", token: "" };
const ORDERS = {
  prompt: ["oldest first", (a, b) => a.prompt_id - b.prompt_id],
  worst: ["lowest reward", (a, b) => a.mean_reward - b.mean_reward],
  best: ["highest reward", (a, b) => b.mean_reward - a.mean_reward],
  longest: ["most tokens", (a, b) => b.num_tokens - a.num_tokens],
  newest: ["newest version", (a, b) => b.max_version - a.max_version],
};

const mismatch = (trajectory, index) => (trajectory.learner_log_probs[index] ?? trajectory.log_probs[index]) - trajectory.log_probs[index];

function tokenSpan(trajectory, index, versions) {
  const text = trajectory.tokens[index] ?? `⟨${trajectory.token_ids[index]}⟩`;
  const version = trajectory.policy_versions[index], logProb = trajectory.log_probs[index];
  const isMasked = trajectory.loss_mask[index] === 0;
  const description = `token ${index}: version ${version}, log-prob ${number(logProb)}${trajectory.learner_log_probs.length ? `, learner's ${number(trajectory.learner_log_probs[index])}` : ""}${isMasked ? ", not trained" : ""}`;
  const span = h("span", { title: description, tabindex: index ? "-1" : "0", class: isMasked ? "masked" : "", "aria-label": `${text} ${description}` }, text);
  if (chosen.colouring === "version") span.classList.add(`v${versions.indexOf(version) % NUM_COLOURS}`);
  else {
    const nats = chosen.colouring === "mismatch" ? Math.abs(mismatch(trajectory, index)) / DIFFERENT_NATS : -logProb / DOUBTFUL_NATS;
    const doubt = Math.min(1, Math.max(0, nats));
    span.style.setProperty("background", `color-mix(in srgb, var(--low) ${Math.round(doubt * 100)}%, var(--high))`);
  }
  return span;
}

function sample(trajectory, index, versions) {
  const parts = Object.entries(trajectory.reward_parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const tokens = trajectory.token_ids.map((_, i) => tokenSpan(trajectory, i, versions));
  return h("article", { "aria-label": `sample ${index}` },
    h("h3", {}, `Sample ${index} · reward ${number(trajectory.reward)}${parts ? ` (${parts})` : ""} · ${tokens.length} tokens · ${trajectory.finish_reason}`),
    rowOf(tokens));
}

function legend(versions, isCompared) {
  if (chosen.colouring === "mismatch")
    return h("p", { class: "legend" }, isCompared
      ? `The stronger the colour, the more the learner's log-prob differs from the engine's (full at ${DIFFERENT_NATS} nats).`
      : "The learner has not computed this group's log-probs, or they are no longer kept.");
  if (chosen.colouring === "version")
    return h("p", { class: "legend" }, versions.map((v, i) => h("span", {}, h("i", { class: `v${i % NUM_COLOURS}` }), `version ${v}`)), h("span", {}, "underlined: not trained"));
  return h("p", { class: "legend" }, `The stronger the colour, the less likely the token was when it was sampled (full at ${-DOUBTFUL_NATS} nats).`);
}

// The prompt is deleted when a checkpoint covers its training.
async function promptTexts() {
  const record = await get(`/prompts/${chosen.promptId}`).catch(() => ({ prompt: null }));
  if (!record.prompt) return null;
  const { messages, token_ids: ids, ground_truth: right } = record.prompt;
  const asked = messages.length ? messages.map((m) => `${m.role}: ${m.content}`).join("\n\n") : `tokens ${ids.join(" ")}`;
  return texts(["Prompt", asked], ["Ground truth", truth(right)]);
}

async function inspector(refresh) {
  const [group, asked] = await Promise.all([get(`/groups/${chosen.promptId}`), promptTexts()]);
  const versions = [...new Set(group.trajectories.flatMap((t) => t.policy_versions))].sort((a, b) => a - b);
  const choice = h("select", { id: "colouring", onchange: (event) => { chosen.colouring = event.target.value; refresh(); } },
    h("option", { value: "version", selected: chosen.colouring === "version" }, "policy version"),
    h("option", { value: "log-prob", selected: chosen.colouring === "log-prob" }, "log-prob"),
    h("option", { value: "mismatch", selected: chosen.colouring === "mismatch" }, "log-prob mismatch with the learner"));
  return card(`Group of prompt ${group.prompt_id}`,
    h("div", { class: "buttons" }, h("label", { for: "colouring" }, "Colour by"), choice,
      h("span", { class: "tag" }, `${group.server_id}, attempt ${group.attempt}`)),
    asked, legend(versions, group.trajectories.some((t) => t.learner_log_probs.length)), group.trajectories.map((t, i) => sample(t, i, versions)));
}

// For links of other views.
export function openGroup(promptId) {
  chosen.promptId = promptId;
  location.hash = "#trajectories";
}

function isWanted(group) {
  return (!chosen.source || group.data_source === chosen.source)
    && (chosen.min === "" || group.mean_reward >= Number(chosen.min)) && (chosen.max === "" || group.mean_reward <= Number(chosen.max));
}

function listed(title, caption, groups, open, none) {
  const rows = groups.map((group) => [
    h("button", { type: "button", "aria-pressed": String(group.prompt_id === chosen.promptId), onclick: () => open(group.prompt_id) }, `Prompt ${group.prompt_id}`),
    group.data_source || "–", number(group.mean_reward), number(group.num_trajectories), number(group.num_tokens),
    group.min_version === group.max_version ? number(group.min_version) : `${group.min_version}–${group.max_version}`, group.server_id,
  ]);
  return card(title, rows.length
    ? table(caption, [["group"], ["data source"], ["reward", "number"], ["samples", "number"], ["tokens", "number"], ["versions"], ["server"]], rows)
    : empty(none));
}

export async function trajectories(refresh) {
  const page = await get(`/groups?page_size=${PAGE}&page_token=${encodeURIComponent(chosen.token)}`);
  const change = (name, value) => { chosen[name] = value; refresh(); };
  const open = (id) => change("promptId", id);
  const groups = page.groups.filter(isWanted).sort(ORDERS[chosen.order][1]);
  const sources = [...new Set([...page.groups.map((group) => group.data_source), chosen.source])].filter(Boolean);
  const fields = [
    ["order", "Order", Object.entries(ORDERS).map(([name, [title]]) => [name, title])],
    ["source", "Data source", [["", "all"], ...sources.map((name) => [name, name])]],
    ["min", "Lowest reward", "number"], ["max", "Highest reward", "number"],
  ];
  const choose = h("section", { class: "card" }, filters(fields, chosen, (values) => { Object.assign(chosen, values); refresh(); },
    chosen.token ? h("button", { type: "button", onclick: () => change("token", "") }, "First page") : null,
    page.next_page_token ? h("button", { type: "button", onclick: () => change("token", page.next_page_token) }, "Next page") : null));
  const waiting = listed("Waiting for the learner", "Groups that wait for the learner", groups.filter((g) => !g.is_taken), open,
    chosen.token ? "No group of this page waits for the learner." : "No group waits for the learner.");
  const taken = groups.filter((group) => group.is_taken);
  const rest = taken.length ? listed("Taken by the learner", "Groups that no checkpoint covers yet", taken, open, "") : null;
  const shown = chosen.promptId === null ? null
    : await inspector(refresh).catch((error) => card(`Prompt ${chosen.promptId}`, empty(error.message)));
  return [shown, choose, waiting, rest];
}
