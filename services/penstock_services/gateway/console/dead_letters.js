// Dead letters: prompts and groups that were put aside as unusable. They can be queued again.
import { get, post } from "/console/api.js";
import { card, clock, confirmed, empty, filters, h, number, say, table } from "/console/elements.js";

const PAGE = 100;
const chosen = { kind: "", tokens: [] };

function byReason(reasons) {
  const rows = Object.entries(reasons).sort((a, b) => b[1] - a[1]).map(([reason, count]) => [reason, number(count)]);
  if (!rows.length) return null;
  return card("Reasons", table("Dead letters by reason", [["reason"], ["dead letters since the run began", "number"]], rows));
}

export async function deadLetters(refresh) {
  const token = chosen.tokens.at(-1) ?? "";
  const page = await get(`/dead-letters?page_size=${PAGE}&kind=${encodeURIComponent(chosen.kind)}&page_token=${encodeURIComponent(token)}`);
  const turn = (tokens, kind = chosen.kind) => { Object.assign(chosen, { tokens, kind }); refresh(); };
  const kinds = [["", "all reasons"], ...Object.keys(page.reasons).map((kind) => [kind, kind])];
  const requeue = async (letter) => {
    if (!(await confirmed(`requeue prompt ${letter.prompt_id}?`, "Its prompt is submitted again under a new id.", "requeue"))) return;
    const answer = await post(`/dead-letters/${letter.letter_id}:requeue`);
    say(`requeued as prompt ${answer.prompt_id}`);
    await refresh();
  };
  const rows = page.dead_letters.map((letter) => [
    number(letter.prompt_id), letter.reason, clock(letter.dead_lettered_at_ms), number(letter.group_bytes),
    h("button", { type: "button", "aria-label": `Requeue prompt ${letter.prompt_id}`, onclick: () => requeue(letter) }, "Requeue"),
  ]);
  const pages = [
    chosen.tokens.length ? h("button", { type: "button", onclick: () => turn([]) }, "Newest") : null,
    page.next_page_token ? h("button", { type: "button", onclick: () => turn([...chosen.tokens, page.next_page_token]) }, "Older") : null,
  ];
  const choose = kinds.length > 1 ? filters([["kind", "Reason", kinds]], chosen, (values) => turn([], values.kind), pages) : null;
  return [byReason(page.reasons), card("Dead letters", choose, rows.length
    ? table("Dead letters, newest first", [["prompt", "number"], ["reason", "wide"], ["dead-lettered"], ["group bytes", "number"], ["action"]], rows)
    : empty("There are no dead letters."))];
}
