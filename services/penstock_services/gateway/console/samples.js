// Samples of training or of validations as text: prompt, ground truth and response side by side, by time or by reward.
import { get } from "/console/api.js";
import { card, empty, filters, h, number, texts, truth } from "/console/elements.js";

const PAGE = 20, SHOWN_START = 100;
const ORDERS = [["", "newest"], ["WORST", "lowest reward"], ["BEST", "highest reward"]];
const KINDS = [["", "training"], ["true", "validations"]];
const FILTERS = [
  ["validation", "Samples of", KINDS], ["order", "Order", ORDERS], ["min_step", "From step", "number"], ["max_step", "To step", "number"],
  ["min_reward", "Lowest reward", "number"], ["max_reward", "Highest reward", "number"], ["data_source", "Data source", "text"],
  ["prompt_id", "Prompt id", "number"], ["text", "Text", "text"],
];
const chosen = { tokens: [] };

function query() {
  const wanted = new URLSearchParams({ page_size: PAGE });
  for (const [name] of FILTERS) if (chosen[name]) wanted.set(name, chosen[name]);
  if (chosen.tokens.length) wanted.set("page_token", chosen.tokens.at(-1));
  return wanted;
}

function shownSample(sample) {
  const parts = Object.entries(sample.reward_parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const versions = sample.min_version === sample.max_version ? `version ${sample.min_version}` : `versions ${sample.min_version}–${sample.max_version}`;
  const facts = [sample.validation ? `validation${sample.validation === "train" ? "" : ` of ${sample.validation}`}` : "", `step ${sample.step}`, `prompt ${sample.prompt_id}.${sample.sample}`, sample.data_source, `${sample.num_tokens} tokens`,
    sample.finish_reason, versions, sample.server_id, sample.is_baseline ? "baseline" : "", sample.reward_failed ? "reward failed" : ""].filter(Boolean).join(" · ");
  return h("details", { class: "sample" },
    h("summary", {}, h("b", {}, `reward ${number(sample.reward)}`), parts ? ` (${parts})` : "", h("span", {}, ` · ${facts} · ${sample.response.slice(0, SHOWN_START)}`)),
    texts(["Prompt", sample.prompt], ["Ground truth", truth(sample.ground_truth)], ["Response", sample.response]));
}

export async function samples(refresh) {
  const page = await get(`/samples?${query()}`);
  const turn = (tokens, values = {}) => { Object.assign(chosen, values, { tokens }); refresh(); };
  const isFiltered = FILTERS.slice(1).some(([name]) => chosen[name]);
  const list = page.samples.length ? page.samples.map(shownSample)
    : empty(isFiltered || chosen.tokens.length ? "No sample matches here." : "There are no samples: no step was trained or validated yet, learner.samples switches them off, or this gateway cannot read the folder that the learner writes to (gateway.samples_dir).");
  return [card(chosen.validation ? "Samples of validations" : "Trained samples", filters(FILTERS, chosen, (values) => turn([], values)), list, h("div", { class: "buttons" },
    chosen.tokens.length ? h("button", { type: "button", onclick: () => turn([]) }, "Newest") : null,
    page.next_page_token ? h("button", { type: "button", onclick: () => turn([...chosen.tokens, page.next_page_token]) }, "Older") : null))];
}
