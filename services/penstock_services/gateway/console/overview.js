// The run at a glance, refreshed every two seconds.
import { get, post } from "/console/api.js";
import { lineChart } from "/console/charts.js";
import { card, confirmed, empty, h, number, say, table } from "/console/elements.js";

const SHOWN_STEPS = 200, SHOWN_STEPS_AT_END = 1000, SHOWN_MOMENTS = 300;
const CHARTS = [["reward", "reward_mean"], ["staleness (versions)", "staleness_mean"], ["tokens per second", "tokens_per_second"]];
// Shown as soon as a step has the number.
const MORE_CHARTS = [
  ["response length (tokens)", "response_length_mean"], ["share of cut responses", "truncated_ratio"], ["entropy (nats)", "entropy"],
  ["KL to the reference (nats)", "kl_reference"], ["KL to the behaviour policy (nats)", "kl_behaviour"],
  ["gradient norm", "grad_norm"], ["learning rate", "lr"], ["log-prob mismatch (nats)", "logprob_mismatch"],
  ["peak memory of a rank (GiB)", "memory_peak_gib"], ["model FLOPs over peak", "mfu"], ["seconds of a step", "step_s"],
  ["generated tokens/s of a busy server", "generation_tokens_per_second"], ["tokens/s of the policy's log-probs", "log_probs_tokens_per_second"],
  ["tokens/s of the reference", "reference_tokens_per_second"], ["tokens/s of the update", "update_tokens_per_second"],
  ["bytes/s of a push", "push_bytes_per_second"], ["seconds comparing servers", "compare_s"],
  ["seconds waiting for a batch", "wait_s"], ["seconds of forward passes", "forward_s"],
  ["seconds of the update", "update_s"], ["seconds gathering weights", "gather_s"],
];
const REWARD_PART = "reward_part/", MAX_PARTS = 8;
const depths = [];
let shownSteps = SHOWN_STEPS;

// A curve for each score of a validation, and for each part of the reward.
function validations(scores) {
  const byName = new Map();
  for (const score of scores) byName.set(score.benchmark, [...(byName.get(score.benchmark) ?? []), score]);
  return [...byName].map(([name, points]) =>
    lineChart(name.replace(/^validation-/, "held-out score, dataset "), points.map((p) => ({ x: p.number, y: p.score }))));
}

function rewardParts(steps) {
  const names = new Set(steps.flatMap((s) => Object.keys(s.metrics).filter((name) => name.startsWith(REWARD_PART))));
  return [...names].sort().slice(0, MAX_PARTS).map((name) =>
    lineChart(`reward part ${name.slice(REWARD_PART.length)}`, steps.map((s) => ({ x: s.step, y: s.metrics[name] ?? NaN }))));
}

const fact = (label, value) => h("div", { class: "card fact" }, h("b", {}, value), h("span", {}, label));

function servers(run) {
  if (!run.servers.length) return empty("There are no rollout servers.");
  const rows = run.servers.map((server) => {
    const lag = run.policy_version - server.policy_version;
    const isServing = (server.state === "READY" || server.state === "LOADING") && !server.breaker_reason && !server.is_quarantined;
    const orders = [
      server.is_drained ? "drained" : "", server.breaker_reason ? "leasing paused" : "",
      server.is_quarantined ? "quarantined" : "",
    ].filter(Boolean);
    return [
      server.server_id,
      h("span", { class: `tag ${isServing ? "good" : "bad"}` }, [server.state, ...orders].join(", ")),
      number(server.policy_version), lag > 0 ? `${lag} behind` : "current", number(server.running_groups),
      `${(server.heartbeat_age_ms / 1000).toFixed(1)} s ago`, server.engine,
    ];
  });
  return table("Versions by server",
    [["server"], ["state"], ["version", "number"], ["lag"], ["groups", "number"], ["heartbeat"], ["engine"]], rows);
}

function alarms(run) {
  const failed = run.metrics.reward_failed_ratio;
  return [
    run.detail ? h("p", { class: "tag bad" }, `${run.state.toLowerCase()}: ${run.detail}`) : null,
    failed ? h("p", { class: "tag bad" }, `the reward failed on ${Math.round(100 * failed)} % of the samples of the newest step`) : null,
    ...(run.notices ?? []).map((notice) => h("details", { class: "card" },
      h("summary", {}, `${notice.text}${notice.count > 1 ? ` (${number(notice.count)} times)` : ""}`),
      notice.detail ? h("pre", {}, notice.detail) : null)),
  ];
}

const paused = (run) => run.servers.filter((server) => server.breaker_reason).map((server) => h("p", { class: "tag bad" },
  `${server.server_id} leases nothing: its last ${server.breaker_failures} attempts failed, the newest with ${server.breaker_reason}`));

const quarantined = (run) => run.servers.filter((server) => server.is_quarantined).map((server) => h("p", { class: "tag bad" },
  `${server.server_id} is in quarantine: its log-probs differ by ${server.logprob_mismatch_nats.toPrecision(3)} nats a token, ` +
  `more than ${server.logprob_limit_nats.toPrecision(3)}; weights loaded again ${server.num_reloads} times`));

function change(run, refresh) {
  const isPaused = ["PAUSED", "STOPPED"].includes(run.state) || run.servers.some((server) => server.breaker_reason);
  const verb = isPaused ? "resume" : "pause";
  const act = async () => {
    const text = verb === "pause" ? "No prompt is leased until it is resumed." : "Prompts are leased again.";
    if (!(await confirmed(`${verb} ${run.run}?`, text, verb))) return;
    await post(`:${verb}`);
    say(`${verb}d`);
    await refresh();
  };
  return h("button", { type: "button", onclick: act }, verb === "pause" ? "Pause" : "Resume");
}

export async function overview(refresh) {
  const [run, history] = await Promise.all([get(""), get(`/metrics?page_size=${shownSteps}`)]);
  shownSteps = ["FINISHED", "STOPPED"].includes(run.state) ? SHOWN_STEPS_AT_END : SHOWN_STEPS;
  document.getElementById("run-name").textContent = run.run;
  depths.push({ x: Date.now(), y: run.queue.queued - run.queue.delivered });
  if (depths.length > SHOWN_MOMENTS) depths.shift();
  const queue = run.queue;
  const held = run.held_version === null ? "" : `, held at ${run.held_version}`;
  const chart = ([title, name]) => lineChart(title, history.steps.map((s) => ({ x: s.step, y: s.metrics[name] ?? NaN })));
  const charts = CHARTS.map(chart);
  charts.push(...validations(history.scores ?? []), ...rewardParts(history.steps));
  const isFinished = run.state === "FINISHED";
  if (!isFinished) charts.push(lineChart("groups ready", depths, (x) => new Date(x).toLocaleTimeString()));
  const isKnown = ([, name]) => history.steps.some((s) => Number.isFinite(s.metrics[name]));
  charts.push(...MORE_CHARTS.filter(isKnown).map(chart));
  return [
    h("div", { class: "facts" },
      fact("state", run.state.toLowerCase() + held), fact("step", number(run.step)),
      fact("policy version", number(run.policy_version)), fact("prompts waiting", number(queue.pending_prompts)),
      fact("in flight", number(queue.in_flight)), fact("groups ready", number(queue.queued - queue.delivered)),
      fact("trained", number(run.num_trained)),
      fact("dead letters", number(queue.dead_lettered))),
    queue.conservation_error ? h("p", { class: "tag bad" }, `the queue's counts are off by ${queue.conservation_error}`) : null,
    ...paused(run), ...quarantined(run), ...alarms(run),
    run.learning ? h("p", {}, h("b", {}, "Learning: "), run.learning) : null,
    run.speed ? h("p", {}, h("b", {}, "Speed: "), run.speed) : null,
    h("div", { class: "charts" }, charts),
    card("Versions by server", servers(run)),
    isFinished ? null : h("div", { class: "buttons" }, change(run, refresh)),
  ];
}
