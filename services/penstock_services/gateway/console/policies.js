// The versions, newest first, with the actions that an operator can take.
import { get, post } from "/console/api.js";
import { card, clock, confirmed, empty, h, number, say, table } from "/console/elements.js";

const TEXTS = {
  promote: "It becomes the one version that is meant for use. Its snapshot is kept, and made if it is the newest version.",
  rewind: "Every rollout server loads its snapshot and stays there until the rewind is released. The learner rewinds to its weights too.",
  retire: "It can no longer be promoted, pinned or rewound to.",
};

function actions(policy, isNewest, refresh) {
  const act = async (verb) => {
    if (!(await confirmed(`${verb} version ${policy.policy_version}?`, TEXTS[verb], verb))) return;
    await post(`/policies/${policy.policy_version}:${verb}`);
    say(`version ${policy.policy_version}: ${verb} done`);
    await refresh();
  };
  const isRetired = policy.state === "RETIRED";
  const button = (verb, title, disabled) =>
    h("button", { type: "button", disabled, "aria-label": `${title} version ${policy.policy_version}`, onclick: () => act(verb).catch(refused) }, title);
  return h("div", { class: "buttons" },
    button("promote", "Promote", isRetired || policy.state === "PROMOTED" || !(policy.snapshot_path || isNewest)),
    button("rewind", "Rewind", isRetired || policy.is_held || !policy.snapshot_path));
}

function refused(error) {
  say(error.message);
  throw error;
}

function state(policy) {
  const tags = [h("span", { class: `tag ${policy.state === "PROMOTED" ? "good" : ""}` }, policy.state.toLowerCase())];
  if (policy.is_held) tags.push(h("span", { class: "tag bad" }, "held"));
  for (const pin of policy.pins) tags.push(h("span", { class: "tag" }, `pin: ${pin}`));
  return h("div", { class: "buttons" }, tags);
}

export async function policies(refresh) {
  const page = await get("/policies?page_size=50");
  if (!page.policies.length) return [card("Policies", empty("No version has been published yet."))];
  const rows = page.policies.map((policy, index) => [
    number(policy.policy_version), number(policy.metrics.reward_mean), actions(policy, index === 0, refresh), state(policy),
    policy.server_ids.join(", ") || "–", h("span", { title: policy.snapshot_path || "Its weights were not kept: it can be neither promoted nor rewound to." }, policy.snapshot_path ? "kept" : "none"), number(policy.step),
    clock(policy.published_at_ms),
  ]);
  const held = page.policies.find((policy) => policy.is_held);
  const release = async () => {
    if (!(await confirmed("release the servers?", "They get the current version again.", "release"))) return;
    await post("/policies:release");
    say("released");
    await refresh();
  };
  return [
    held ? h("section", { class: "card buttons" }, h("span", {}, `Servers are held at version ${held.policy_version}.`),
      h("button", { type: "button", class: "primary", onclick: release }, "Release")) : null,
    card("Policies", table("Policy versions, newest first",
      [["version", "number"], ["reward", "number"], ["actions"], ["state"], ["served by"], ["snapshot"], ["step", "number"], ["published"]], rows)),
  ];
}
