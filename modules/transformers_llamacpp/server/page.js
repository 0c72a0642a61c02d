() => {
    // The choice of light or dark outlives a reload; without one the system's is followed.
    const root = document.body;
    const saved = localStorage.getItem("theme");
    if (saved) root.classList.toggle("dark", saved === "dark");
    document.addEventListener("click", (event) => {
        if (!event.target.closest("#theme")) return;
        localStorage.setItem("theme", root.classList.toggle("dark") ? "dark" : "light");
    });
    document.addEventListener("keydown", (event) => {
        if (event.key === "Escape") document.querySelector("#prompt .stop-button")?.click();
    });
}
