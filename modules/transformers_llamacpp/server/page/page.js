() => {
    const all = (selector, root = document) => [...root.querySelectorAll(selector)];
    const one = (selector, root = document) => root.querySelector(selector);

    // -- light and dark: the choice outlives a reload; without one the system's is followed ---------------------------
    const body = document.body;
    const saved = localStorage.getItem("theme");
    if (saved) body.classList.toggle("dark", saved === "dark");

    // -- the parameters, a drawer where the window is narrow ----------------------------------------------------------
    const drawer = (open) => {
        body.classList.toggle("side-open", open);
        one("#side-toggle")?.setAttribute("aria-expanded", String(open));
        (open ? one("#side input, #side button") : one("#side-toggle"))?.focus();
    };

    // -- versions and branches: buttons beside Gradio's own at each message --------------------------------------------
    const BRANCH = '<svg viewBox="0 0 16 16" aria-hidden="true"><circle cx="4" cy="3" r="1.6"/><circle cx="4" cy="13" r="1.6"/>'
        + '<circle cx="12" cy="5" r="1.6"/><path d="M4 4.6v6.8M12 6.6c0 3-8 1.6-8 4.8"/></svg>';
    const send = (what) => window.chatTree?.(what);

    const button = (text, label, what) => {
        const made = document.createElement("button");
        made.type = "button";
        if (text === "branch") made.innerHTML = BRANCH;
        else made.textContent = text;
        made.title = label;
        made.setAttribute("aria-label", label);
        made.addEventListener("click", () => send(what));
        return made;
    };

    const treeButtons = (at, [number, count], last) => {
        const made = document.createElement("span");
        made.className = "tree-buttons";
        if (count > 1) {
            const shown = document.createElement("span");
            shown.textContent = `${number}/${count}`;
            made.append(button("‹", "The version before", { op: "switch", at, step: -1 }), shown,
                button("›", "The next version", { op: "switch", at, step: 1 }));
        }
        if (!last) made.append(button("branch", "Branch: go on from here", { op: "branch", at }));
        return made;
    };

    const decorate = () => {
        const data = one("#tree-data");
        const chat = one("#chat");
        if (!data || !chat) return;
        const versions = JSON.parse(data.dataset.versions);
        const rows = all(".message-row", chat);
        rows.forEach((row, at) => {
            const place = row.nextElementSibling?.matches(".message-buttons") && one(".icon-button-wrapper", row.nextElementSibling);
            if (!place) return;
            const old = one(".tree-buttons", place);
            const last = at === versions.length - 1;
            const key = versions[at] ? `${at} ${versions[at]} ${last}` : "";
            if ((old?.dataset.key ?? "") === key) return;
            old?.remove();
            if (!key) return;
            const made = treeButtons(at, versions[at], last);
            made.dataset.key = key;
            place.prepend(made);
        });
        const after = Number(data.dataset.after);
        let bar = one("#resume");
        if (after && !bar) {
            bar = document.createElement("div");
            bar.id = "resume";
            one("#status")?.before(bar);
        }
        if (bar && !after) bar.remove();
        if (bar && after && bar.dataset.after !== String(after)) {
            bar.dataset.after = String(after);
            bar.replaceChildren(button(`Show what came after this (${after})`, "Show what came after this", { op: "resume" }));
        }
    };

    let planned = false;
    new MutationObserver(() => {
        if (planned) return;
        planned = true;
        requestAnimationFrame(() => { planned = false; decorate(); });
    }).observe(body, { childList: true, subtree: true, attributeFilter: ["data-versions"] });

    // -- conversations as files: made and read here, so that none is kept on the server ---------------------------------
    window.saveChat = (text) => {
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
        link.download = "chat.json";
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    };
    window.openChat = () => {
        const input = document.createElement("input");
        input.type = "file";
        input.accept = ".json,application/json";
        input.addEventListener("change", async () => {
            if (input.files.length) send({ op: "open", text: await input.files[0].text() });
        });
        input.click();
    };

    // -- a token and its rivals -----------------------------------------------------------------------------------------
    const cell = (tag, text, name = "") => {
        const made = document.createElement(tag);
        made.textContent = text;
        if (name) made.className = name;
        return made;
    };
    const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
    const share = (value, name) => {
        const made = cell("td", "", `share ${name}`);
        const bar = cell("i", "");
        bar.style.width = `${Math.max(0.5, 100 * value)}%`;
        made.append(bar, cell("span", percent(value)));
        return made;
    };

    const choose = (token, focus) => {
        const box = token.closest("#tokens");
        for (const other of all(".token", box)) {
            other.setAttribute("aria-selected", String(other === token));
            other.tabIndex = other === token ? 0 : -1;
        }
        if (focus) token.focus();
        const rivals = JSON.parse(token.dataset.rivals);
        const place = one(".rivals", box);
        if (!rivals.length) {
            place.replaceChildren(cell("p", "Nothing was kept about this token.", "nothing"));
            return;
        }
        const guided = rivals.some((rival) => rival[2] !== null);
        const table = document.createElement("table");
        const head = document.createElement("tr");
        head.append(cell("th", "token"), cell("th", guided ? "without guidance" : "probability"));
        if (guided) head.append(cell("th", "with guidance"));
        table.append(head);
        for (const [text, plain, with_, chosen] of rivals) {
            const row = cell("tr", "", chosen ? "chosen" : "");
            const name = cell("td", "");
            name.append(cell("code", text));
            row.append(name, share(plain, "plain"));
            if (guided) row.append(share(with_, "guided"));
            table.append(row);
        }
        place.replaceChildren(table);
    };

    const walk = (token, key) => {
        const tokens = all(".token", token.parentElement);
        const at = tokens.indexOf(token);
        const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: tokens.length - 1 }[key];
        if (to === undefined) return false;
        if (tokens[to]) choose(tokens[to], true);
        return true;
    };

    // -- clicks and keys -----------------------------------------------------------------------------------------------
    document.addEventListener("click", (event) => {
        const at = event.target;
        if (at.closest("#theme")) localStorage.setItem("theme", body.classList.toggle("dark") ? "dark" : "light");
        if (at.closest("#side-toggle")) drawer(!body.classList.contains("side-open"));
        if (at.closest("#side-close")) drawer(false);
        const token = at.closest("#tokens .token");
        if (token) choose(token, false);
    });
    document.addEventListener("keydown", (event) => {
        const at = event.target;
        if (event.key === "Escape") {
            if (body.classList.contains("side-open")) drawer(false);
            else (one("#prompt .stop-button") ?? one("#raw-stop:not(:disabled)"))?.click();
        }
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && at.closest?.("#raw")) {
            event.preventDefault();
            one("#raw-run")?.click();
        }
        if (at.matches?.("#tokens .token") && walk(at, event.key)) event.preventDefault();
    });
}
