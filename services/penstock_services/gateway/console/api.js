// Calls the REST interface for the run in the address (`/?run=NAME`), or for the gateway's own run. The key is kept in the
// session storage of this tab.
export const runName = new URLSearchParams(location.search).get("run") ?? "-";
const RUN = `/v1/runs/${encodeURIComponent(runName)}`;
let asking = null;

// A link of `penstock up` carries the key behind the #, where it is never sent to a server. It is taken out of the address.
const given = /^#key=([\w-]+)$/.exec(location.hash);
if (given) {
  sessionStorage.setItem("penstock-key", given[1]);
  history.replaceState(null, "", location.pathname + location.search);
}

export class Problem extends Error {
  constructor(problem) {
    super(problem.detail);
    this.status = problem.status;
  }
}

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("penstock-key", document.getElementById("key").value);
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

export async function call(method, path, root = RUN) {
  for (;;) {
    const key = sessionStorage.getItem("penstock-key");
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(root + path, { method, headers, cache: "no-store" });
    if (response.ok) return response.json();
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    const unreadable = { status: response.status, detail: `the gateway answered ${response.status}` };
    throw new Problem(await response.json().catch(() => unreadable));
  }
}

export const getAt = (path) => call("GET", path, "");
export const get = (path) => call("GET", path);
export const post = (path) => call("POST", path);
