// Dead letters: prompts and groups that were put aside as unusable. They can be queued again.
import { get, post } from "/console/api.js";
import { card, clock, confirmed, empty, h, number, say, table } from "/console/elements.js";

export async function deadLetters(refresh) {
  const page = await get("/dead-letters?page_size=100");
  const requeue = async (letter) => {
    if (!(await confirmed(`requeue prompt ${letter.prompt_id}?`, "Its prompt is submitted again under a new id.", "requeue"))) return;
    const answer = await post(`/dead-letters/${letter.letter_id}:requeue`);
    say(`requeued as prompt ${answer.prompt_id}`);
    await refresh();
  };
  const rows = page.dead_letters.map((letter) => [
    number(letter.prompt_id), letter.reason, clock(letter.buried_at_ms), number(letter.group_bytes),
    h("button", { type: "button", "aria-label": `Requeue prompt ${letter.prompt_id}`, onclick: () => requeue(letter) }, "Requeue"),
  ]);
  return [card("Dead letters", rows.length
    ? table("Dead letters, newest first", [["prompt", "number"], ["reason", "wide"], ["buried"], ["group bytes", "number"], ["action"]], rows)
    : empty("There are no dead letters."))];
}
